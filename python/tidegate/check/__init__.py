"""Numeric checks of whole models, patched or not."""

from tidegate.check.isolation import check_isolation
from tidegate.check.model import check

__all__ = ["check", "check_isolation"]

"""The patch layer: Tidegate's operators under the models of Transformers, one instance at a time."""

from tidegate.patch.engine import kernelize_model, patch, report_model, unpatch
from tidegate.patch.handle import PatchHandle, PatchReport
from tidegate.patch.site import ForwardSite, Site, call_original

__all__ = [
    "ForwardSite",
    "PatchHandle",
    "PatchReport",
    "Site",
    "call_original",
    "kernelize_model",
    "patch",
    "report_model",
    "unpatch",
]

"""Packed batches: several sequences in one row of tokens, none of which sees another."""

from tidegate.packed.collate import pack

__all__ = ["pack"]

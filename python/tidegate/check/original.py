"""The model as it was before it was patched, for the length of a block."""

import contextlib
import warnings

from tidegate.patch.engine import existing_handle
from tidegate.patch.resolve import core


def handle_of(model):
    """The handle of a patched model, or None."""
    handle = existing_handle(core(model))
    return handle if handle is not None and handle.installed else None


@contextlib.contextmanager
def unpatched(handle):
    """Undoes a patch and puts it back. A forward that someone has wrapped stays, and calls the original meanwhile."""
    before = handle.sites, handle.installed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of wrapped forwards
        handle.undo()
    try:
        yield
    finally:
        handle.restore(*before)

"""patch() without a model."""

from tidegate.errors import PatchError


def patch_process(root, settings, replace):
    raise PatchError("patch() without a model is not available yet: pass the model")

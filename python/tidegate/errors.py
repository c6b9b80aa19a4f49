"""The exceptions of the Python layer. Operators raise plain ValueError and TypeError with the native library's text."""


class OptionError(ValueError):
    """An option, or an environment variable with the prefix TIDEGATE_, has an unknown name or value."""


class PatchError(RuntimeError):
    """A model could not be patched; nothing was changed."""


class NothingPatchedError(PatchError):
    """A patch, or an operator asked for by name, found no place in the model."""


class PatchConflictError(PatchError):
    """The model is already patched with other options."""


class SelfTestError(PatchError):
    """A replacement did not compute what the module it was to replace computes."""


class PackedInputError(ValueError):
    """The description of a packed batch is missing, wrong or contradictory."""


class ReplayError(ValueError):
    """A replay of expert choices that does not fit what was recorded."""


class IsolationError(RuntimeError):
    """A sample of a packed batch changed another one."""


class ExpertParallelError(RuntimeError):
    """Another rank failed, died or did not come, or the ranks disagree; the text names it. The buffer needs a reset."""


class SequenceParallelError(RuntimeError):
    """A step cannot run sequence-parallel; all ranks of the group raise it, with the same text."""


class TidegateFallbackWarning(UserWarning):
    """Something runs in plain torch because the native library cannot do it; the text says why and what to do."""

"""tidegate.report(): what runs here, and why."""

import os
import platform

import torch

from tidegate import _native, options


class Report(dict):
    """A dict that prints as a table."""

    def __str__(self):
        width = max(len(key) for key in self)
        return "\n".join(f"{key:<{width}}  {value}" for key, value in self.items())

    __repr__ = __str__


def report():
    """Version, instruction sets, threads, torch, and which native library is loaded or why not."""
    facts = Report(tidegate=_native.__version__)
    loaded = _native.load_error is None
    facts["native library"] = str(_native.library_path) if loaded else f"not loaded: {_native.load_error}"
    facts["fallback"] = f"plain torch: {_native.fallback}" if _native.fallback else "no"
    if loaded or _native.fallback:
        try:
            version, active, available = _native._about()
            facts["native version"] = version if loaded else "none"
            facts["isa in use"] = active
            facts["isa available"] = ", ".join(available)
        except _native.NATIVE_ERRORS as error:  # TIDEGATE_ISA holds a name that this CPU does not have
            facts["isa in use"] = f"none: {str(error).splitlines()[0]}"
    facts["threads"] = f"{torch.get_num_threads()} (torch's pool)"
    facts["torch"] = torch.__version__
    facts["python"] = platform.python_version()
    for name in options.BY_NAME:
        if os.environ.get(name):
            facts[name] = os.environ[name]
    return facts

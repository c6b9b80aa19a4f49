"""tidegate.report(): what runs here, and why."""

import importlib.metadata
import importlib.util
import os
import platform
import sys

import torch

from tidegate import _native
from tidegate.options import BY_NAME, PREFIX
from tidegate.patch import PatchReport, report_model

PACKAGES = ("transformers", "fla", "causal_conv1d", "kernels", "peft", "accelerate")


def _version(package):
    try:
        return importlib.metadata.version({"fla": "flash-linear-attention"}.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


class Report(dict):
    """A dict that prints as a table."""

    def __str__(self):
        width = max(len(key) for key in self)
        return "\n".join(f"{key:<{width}}  {value}" for key, value in self.items())

    __repr__ = __str__


def report(model: torch.nn.Module | None = None) -> Report | PatchReport:
    """What runs here: versions, instruction sets, threads, native library. With a model: what is patched in it."""
    if model is not None:
        return report_model(model)
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
    # Without that module there is no patch of the process; importing it takes a second (torch._dynamo).
    process = sys.modules.get("tidegate.patch.process")
    if process and (handle := process.process_handle()):
        places = handle.report()
        facts["patch()"] = f"installed in {len(places.only(status='installed'))} of {len(places)} places of the process"
        for row in places:
            facts[f"  {row.path} {row.op}"] = " ".join(cell for cell in row[2:] if cell)
    facts["torch"] = torch.__version__
    facts["python"] = platform.python_version()
    for name in PACKAGES:
        if importlib.util.find_spec(name) is not None:
            facts[name] = _version(name)
    for name in sorted(os.environ):
        if name.startswith(PREFIX):
            facts[name] = os.environ[name] + ("" if name in BY_NAME else "  (unknown: patch() will refuse it)")
    return facts

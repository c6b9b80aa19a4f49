"""Engines: one module each, all with the same names.

PACKAGES   distribution -> the version that the entries were written for (None: any)
load(n)    imports the package and sets n threads; raises Absent with the reason when it cannot run here
ENTRIES    kind of item -> {variant: builder}; builder(item, x) -> Run. The variant "" is the engine's plain entry
LACKS      kind of item -> why there is no entry
about()    optional: one line on what was loaded
"""

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ORDER = ("tidegate", "torch_eager", "transformers", "vllm_cpu", "zentorch", "onnxruntime", "fla")


class Absent(Exception):
    """The engine, or this item on it, cannot run here; the text says why."""


@dataclass
class Run:
    call: Callable[[], Any]  # one timed call; engines that update a state in place do so on every call
    outputs: Callable[[Any], dict]  # what the first call returned -> {output name: tensor in the reference's layout}
    note: str = ""  # what differs from the item as stated: other types, other layouts


def versions(name: str) -> dict[str, str | None]:
    found = {}
    for package in importlib.import_module(f"engines.{name}").PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def start(name: str, threads: int) -> dict:
    """Loads an engine. Never raises for a missing or broken package: the answer's "status" says what happened."""
    module, found, status = importlib.import_module(f"engines.{name}"), versions(name), "ok"
    missing = [p for p, v in found.items() if v is None]
    other = [
        f"{p} {found[p]} instead of {wanted}"
        for p, wanted in module.PACKAGES.items()
        if wanted and found[p] and not f"{found[p]}.".startswith(f"{wanted}.")
    ]
    if missing:
        status = f"absent: {', '.join(missing)} not installed"
    else:
        try:
            module.load(threads)
        except Absent as reason:
            status = f"absent: {reason}"
        except Exception as error:  # a package that does not import is a result, not a reason to stop the run
            status = f"absent: {type(error).__name__}: {error}"
    about = module.about() if status == "ok" and hasattr(module, "about") else ""
    return {"status": status, "versions": found, "other_version": ", ".join(other), "about": about}


def entries(name: str, kind: str) -> dict[str, Callable]:
    """Row name -> builder for one kind of item; raises Absent when the engine has none."""
    module = importlib.import_module(f"engines.{name}")
    if kind not in module.ENTRIES:
        raise Absent(module.LACKS.get(kind, "no such operator"))
    return {f"{name}/{variant}" if variant else name: build for variant, build in module.ENTRIES[kind].items()}

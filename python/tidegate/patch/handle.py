"""What patch() returns: the report of its sites, and the way back."""

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from tidegate import _native


class Settings(NamedTuple):
    """What makes two calls of patch() the same."""

    ops: tuple
    options: object
    scope: str
    check: str

    def differences(self, other):
        """One line for every setting that installs something else, as "name: here -> there". Strictness does not."""
        lines = [
            f"{name}: {getattr(self, name) or 'all'!r} -> {getattr(other, name) or 'all'!r}"
            for name in ("ops", "scope", "check")
            if getattr(self, name) != getattr(other, name)
        ]
        for field in dataclasses.fields(self.options):
            mine, theirs = getattr(self.options, field.name), getattr(other.options, field.name)
            if field.compare and field.name != "strict" and mine != theirs:
                lines.append(f"{field.name}: {mine} -> {theirs}")
        return lines


class Row(NamedTuple):
    """One line of a report."""

    path: str
    op: str
    status: str
    mechanism: str
    kernel: str
    checked: str
    reason: str


class PatchReport(list):
    """Rows, one a site; prints as a table. `notes` says what no row says."""

    def __init__(self, rows: Iterable[Row] = (), notes: Iterable[str] = ()) -> None:
        super().__init__(rows)
        self.notes = list(notes)

    def only(self, **wanted: str) -> list[Row]:
        """The rows with these values, e.g. only(op="gdn_layer", status="installed")."""
        return [row for row in self if all(getattr(row, name) == value for name, value in wanted.items())]

    def __str__(self):
        widths = [max((len(row[i]) for row in self), default=0) for i in range(len(Row._fields) - 1)]
        lines = [
            "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
            for row in self
        ]
        return "\n".join([*lines, *self.notes]) or "not patched"

    __repr__ = __str__


def _kernel():
    if _native.load_error is not None:
        return "fallback"
    try:
        return _native.isa()
    except ValueError:  # TIDEGATE_ISA holds a name that this CPU does not have; the first call of an operator says so
        return "none"


class PatchHandle:
    """The patch of one model, or of the process. Leaving a `with` block undoes it."""

    def __init__(
        self, model: torch.nn.Module | None, settings: Settings, sites: Iterable[Any] = (), notes: Iterable[str] = ()
    ) -> None:
        self.model, self.settings = model, settings
        self.sites, self.notes = list(sites), list(notes)

    @property
    def installed(self) -> list[Any]:
        """The sites that are in force."""
        return [site for site in self.sites if site.installed]

    def report(self) -> PatchReport:
        """One row for every site: where, which operator, its state now, how, and why not."""
        kernel = _kernel()
        rows = []
        for site in self.sites:
            status = site.status()
            here = status == "installed"
            status = "fallback" if here and kernel == "fallback" else status
            rows.append(
                Row(site.path, site.op, status, site.mechanism, kernel if here else "-", site.checked, site.remarks())
            )
        sources = [
            f"option {name} = {getattr(self.settings.options, name)} ({source})"
            for name, source in sorted(self.settings.options.sources.items())
        ]
        return PatchReport(rows, [*self.notes, *sources])

    def install(self) -> None:
        """Installs all sites that are not refused; on any failure none."""
        done = []
        try:
            for site in self.sites:
                if not site.verdict and not site.installed:
                    done.append(site)
                    site.install(self.settings, self)
        except BaseException:
            for site in reversed(done):
                site.undo()
            raise

    def repair(self) -> None:
        """Installs again what others have removed since."""
        for site in self.installed:
            site.repair()

    def undo(self) -> None:
        """Puts everything back. A function of ours that someone has wrapped stays and calls the original."""
        for site in reversed(self.sites):
            site.undo()
        kept = [site for site in self.sites if not site.active]
        if kept:
            warnings.warn(
                f"tidegate: {len(kept)} patched forwards were wrapped by someone else and stay, calling the original: "
                f"{', '.join(site.path for site in kept[:3])}",
                stacklevel=2,
            )
        self.sites = kept

    def restore(self, sites: list[Any], installed: list[Any]) -> None:
        """Takes an undo back: these were the sites, and those of them that were installed."""
        for site in installed:
            if site.active:
                site.install(self.settings, self)
            else:  # someone has wrapped it: it only slept
                site.active = site.installed = True
        self.sites = sites

    def invalidate(self) -> None:
        """Forgets what was derived from weights: call it after changing frozen weights through .data."""
        for site in self.sites:
            site.invalidate()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.undo()

    def __repr__(self):
        return f"<tidegate.PatchHandle: {len(self.installed)} sites installed>"

    def __deepcopy__(self, memo):
        return None  # a copied model gets a handle of its own when it is asked for

    def __reduce__(self):
        return type(None), ()

"""tidegate.patch and its relatives: find the sites, test them, install all of them or none."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from tidegate._native import isa
from tidegate.errors import NothingPatchedError, OptionError, PatchConflictError, PatchError, SelfTestError
from tidegate.options import PatchOptions, nearest, resolve
from tidegate.patch import hub_kernels
from tidegate.patch import resolve as modules
from tidegate.patch.handle import PatchHandle, PatchReport, Settings
from tidegate.patch.selftest import surroundings
from tidegate.patch.site import record_of

OPS = {  # every op that a site can have, and the switch that governs it
    "gdn_layer": "gdn",
    "gated_rmsnorm": "gated_rmsnorm",
    "rmsnorm": "rmsnorm",
    "rope": "rope",
    "swiglu": "swiglu",
    "attention": "attention",
    "linear": "linear",
    "packed": "fused_ops",
    "router": "router",
    "experts": "gmm",
    "sparse_moe": "sparse_moe",
}
GROUPS = {
    "gdn": ("gdn_layer",),
    "moe": ("router", "experts", "sparse_moe"),
    "norms": ("gated_rmsnorm", "rmsnorm"),
    "attention": (
        "attention",
        "packed",
    ),  # our attention leaves it to the model's forward to see that positions restart
}
OPTIONAL = ("sparse_moe",)  # another block than the known one is served part by part
CHECKS = ("install", "off")
SCOPES = ("model", "process")


def _names(ops):
    """The ops asked for, in the order of the table; "all" is the empty tuple of names asked for."""
    if ops == "all":
        return ()
    given = (ops,) if isinstance(ops, str) else tuple(ops)
    wanted = set()
    for name in given:
        if name not in OPS and name not in GROUPS:
            known = list(dict.fromkeys([*OPS, *GROUPS]))
            raise OptionError(f"unknown op {name!r}{nearest(str(name), known)}; known: all, {', '.join(known)}")
        wanted |= set(GROUPS.get(name, (name,)))
    if not wanted:
        raise OptionError('ops: expected "all" or at least one name, got none')
    return tuple(op for op in OPS if op in wanted)


def finders():
    """The functions find(root, options) -> sites, in the order in which sites are installed."""
    from tidegate.packed.sites import find_attention, find_packed
    from tidegate.patch import gdn, linear, moe, norms, rope, router, sparse_moe, swiglu

    parts = [gdn.find, norms.find_gated, norms.find, rope.find, swiglu.find, linear.find, router.find, moe.find]
    return [*parts, sparse_moe.find, find_attention, find_packed]


def _find(root, asked, options):
    """All sites of the ops asked for whose switches are on, and notes about those that are off."""
    sites, notes = [], []
    wanted = asked or tuple(OPS)
    off = {op: options.why_off(switch) for op, switch in OPS.items() if op in wanted and options.why_off(switch)}
    for finder in finders():
        if any(op in wanted and op not in off for op in finder.ops):
            sites += [site for site in finder(root, options) if site.op in wanted and site.op not in off]
    notes += [f"{op}: not installed: {why}" for op, why in off.items()]
    for site in sites:
        device = None if site.verdict else modules.foreign_device(site.module)
        if device is not None:
            site.refuse(f"parameters are on {device}: move the model to the CPU")
    return sites, notes


def _outcome(test):
    """(what a self-test found, None), or ("", the error)."""
    try:
        return test(), None
    except SelfTestError as error:
        return "", error
    except Exception as error:  # the module cannot be called as its family is
        text = str(error).strip().split("\n")[0]
        problem = SelfTestError(f"self-test: cannot be called: {type(error).__name__}: {text}")
        problem.__cause__ = error
        return "", problem


def _test(sites, settings):
    """Compares every kind of replacement with its original, once. Returns nothing; sites know what was found."""
    found = {}
    for site in sites:
        if site.verdict or site.test is None:
            continue
        blocked = modules.unreadable(site.module)
        if blocked or settings.check == "off":
            site.checked = f"unchecked: {blocked or 'check is off'}"
            if not site.known:
                site.refuse(f"a family that is not known must be tested, but is {site.checked}")
            continue
        key = site.test_key if site.test_key is not None else id(site)
        if key not in found:
            found[key] = _outcome(site.test)
        site.checked, error = found[key]
        if error is not None:
            if settings.options.strict and site.known:
                raise SelfTestError(f"{site.path}: {error}") from error
            site.refuse(str(error))


def _demand(root, sites, asked, options, notes):
    """Complains if there is nothing to install, or less than was asked for."""
    taken = {site.op for site in sites if not site.verdict}
    problems = []
    if not taken:
        problems.append("found nothing to patch")
    problems += [f"found no place for {op!r}" for op in asked if op not in (*taken, *OPTIONAL) and options.on(OPS[op])]
    layers = modules.linear_layers(root)
    if layers and options.on("gdn") and (not asked or "gdn_layer" in asked):
        found = {id(site.module) for site in sites if site.op == "gdn_layer" and not site.verdict}
        count = sum(id(module) in found for _, module in root.named_modules(remove_duplicate=False))
        if count < layers:
            problems.append(f"found {count} of {layers} linear-attention layers")
    if not problems:
        return
    why = dict.fromkeys(f"{site.op} in {type(site.module).__name__}: {site.reason}" for site in sites if site.verdict)
    text = "; ".join(problems) + f". Classes seen: {modules.class_names(root)}"
    text = "; ".join([text, *list(why)[:5], *notes])
    if options.strict:
        raise NothingPatchedError(f"{text}. With strict=False this is a warning")
    warnings.warn(f"tidegate.patch: {text}", stacklevel=3)


def existing_handle(root):
    """The handle of a patched model, or one over the patches of its parts and copies. None if there is no patch."""
    records = [record for _, module in modules.named_modules(root) if (record := record_of(module)) is not None]
    handles = list(dict.fromkeys(record.handle for record in records))
    if len(handles) == 1 and handles[0] is not None:
        return handles[0]
    if not records:
        return None
    sites = [site for handle in handles if handle is not None for site in handle.sites]
    sites += [site for record in records if record.handle is None for site in record.sites.values()]
    joined = PatchHandle(None, records[0].settings, sites)
    for record in records:
        record.handle = joined
    return joined


def _covers(handle, root):
    """Whether a handle is of a patch of the whole model: not of some parts, nor of the one that was copied."""
    return handle.model is not None and any(module is root for module in handle.model.modules())


def patch(
    model: torch.nn.Module | None = None,
    ops: str | Iterable[str] = "all",
    options: PatchOptions | dict[str, Any] | None = None,
    strict: bool = True,
    check: str = "install",
    padding_free: bool | None = None,
    scope: str = "model",
    replace: bool = False,
) -> PatchHandle:
    """Puts the operators under a model; returns a handle with report() and undo(). See docs/patching.md.

    Without a model: for every model of the process. strict=False makes a warning of a place that was not found.
    """
    names = _names(ops)
    if check not in CHECKS:
        raise OptionError(f"check: expected one of {CHECKS}, got {check!r}")
    if scope not in SCOPES:
        raise OptionError(f"scope: expected one of {SCOPES}, got {scope!r}")
    off = {"strict": None if strict else False, "check": None if check == "install" else False}  # None: not asked for
    options = resolve(options, padding_free=padding_free, **off)
    scope = "process" if model is None else scope
    settings = Settings(names, options, scope, "install" if options.check else "off")
    if options.enabled:
        isa()  # raises if there is no library, or if TIDEGATE_ISA names what the CPU lacks
    if scope == "process":
        from tidegate.patch.process import patch_process

        return patch_process(None if model is None else modules.core(model), settings, replace)
    root = modules.core(model)
    handle = existing_handle(root)
    handle = handle if handle is not None and handle.installed else None
    changes = [] if handle is None else handle.settings.differences(settings)
    if changes and not replace:
        raise PatchConflictError(
            f"the model is already patched with other settings ({'; '.join(changes)}): undo() the first patch or pass "
            "replace=True"
        )
    if handle is not None and not changes and not replace and _covers(handle, root):
        handle.repair()
        return handle
    if not options.enabled:
        return PatchHandle(root, settings, notes=[f"nothing is installed: {options.why_off('enabled')}"])
    if handle is None:
        return _install(root, settings)
    before = handle.sites, handle.installed
    handle.undo()
    try:
        return _install(root, settings)
    except BaseException:
        handle.restore(*before)
        raise


def _install(root, settings):
    with surroundings():
        sites, notes = _find(root, settings.ops, settings.options)
        _test(sites, settings)
    _demand(root, sites, settings.ops, settings.options, notes)
    handle = PatchHandle(root, settings, sites, notes)
    handle.install()
    hub_kernels.register(root, handle.installed)
    return handle


def unpatch(model: torch.nn.Module | None = None) -> bool:
    """Undoes the patch of a model, or without one that of the process. True if there was one."""
    from tidegate.patch.process import process_handle

    handle = process_handle() if model is None else existing_handle(modules.core(model))
    if handle is not None:
        handle.undo()
    return handle is not None


def report_model(model: torch.nn.Module) -> PatchReport:
    """The report of a model's patch; empty if it has none."""
    handle = existing_handle(modules.core(model))
    return PatchReport() if handle is None else handle.report()


def kernelize_model(
    model: torch.nn.Module, mode: object = None, device: torch.device | str | None = None, use_fallback: bool = True
) -> torch.nn.Module:
    """The same work under the name that trainers call; returns what it was given. use_fallback=False is strict."""
    kind = getattr(device, "type", str(device).split(":")[0] if device is not None else "cpu")
    if kind == "cpu":
        handle = patch(model, strict=not use_fallback)
        if mode is not None and f"mode: {mode}" not in handle.notes:
            handle.notes = [*handle.notes, f"mode: {mode}"]
    elif not use_fallback:
        raise PatchError(f"kernelize_model: expected device cpu, got {device}: these operators run on the CPU")
    return model

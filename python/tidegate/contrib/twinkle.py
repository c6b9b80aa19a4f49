"""Tidegate as the backend "cpu" of twinkle's kernelize (twinkle-kit 0.5).

    from twinkle.kernel import kernelize
    from tidegate.contrib import twinkle as bridge
    kernelize(model, bridge.mapping())

`mapping()` has one entry: our patch of the whole model, which knows wrappers, old and new releases, packed input, and
undo (`bridge.handle(model).undo()`; twinkle itself has neither undo nor report). `function_mapping(model)` is the fine
way, for whoever wants to choose: the four functions of the model's linear-attention layers, one entry each, for the
whole process, as twinkle installs them.

twinkle has no CPU platform: without a GPU it assumes one. A run on the CPU calls `cpu_platform()` before it makes a
device mesh or a model.
"""

import importlib

import tidegate
from tidegate.patch import gdn_ops
from tidegate.patch.code import global_names
from tidegate.patch.engine import existing_handle
from tidegate.patch.resolve import core

TARGET = "tidegate"  # a name, not a path: our installer looks at the model itself
FUNCTIONS = {name: function for names in gdn_ops.NAMES.values() for name, function in names.items()}
# twinkle's own packed patch is for releases before 5.15 and sets this; it does nothing where it finds it.
PACKED_MARKER = "_twinkle_gdn_padding_free_patched"


def _registry():
    try:
        return importlib.import_module("twinkle.kernel.registry")
    except ImportError as error:
        raise ImportError(f"tidegate.contrib.twinkle needs twinkle-kit: {error}") from error


def _available():
    if tidegate._native.load_error is not None and tidegate._native.fallback is None:
        return False, f"the native library is not loaded: {tidegate._native.load_error}"
    return True, None


def _op(registry, name, implementation):
    """Registers an op once. twinkle has no way to add a backend to a name that it has, so the names are ours."""
    try:
        registry.get_op(name)
    except ValueError:
        impl = registry.KernelImpl(load=lambda target: implementation, available=_available)
        registry.register_op(name, implementations={"cpu": impl})
    return registry.KernelChoice(op=name, backends=("cpu",))


def _mark(model):
    for module in (model, core(model)):
        object.__setattr__(module, PACKED_MARKER, True)


def mapping(**options):
    """For kernelize(model, ...): everything that tidegate.patch installs. options as tidegate.patch takes them."""

    def installer(model, target, patch):
        patch(model, **options)  # raises what it raises: twinkle would go on with an unpatched model
        _mark(model)
        register_experts()

    registry = _registry()
    choice = _op(registry, TARGET, tidegate.patch)
    return {TARGET: registry.KernelChoice(op=choice.op, backends=choice.backends, installer=installer)}


def function_mapping(model):
    """For kernelize(model, ...): the four functions of the model's linear-attention layers, by their dotted paths.

    Only where the modeling file calls them by global names (Transformers 5.15 and later); raises otherwise.
    """
    registry, found = _registry(), {}
    layers = {type(m) for m in core(model).modules() if hasattr(m, "A_log") and hasattr(m, "dt_bias")}
    for layer in layers:
        names = global_names(layer.forward) & FUNCTIONS.keys()
        # Older layers call attributes of their own, two of which have the names of globals.
        for name in names if "torch_chunk_gated_delta_rule" in names else ():
            choice = _op(registry, f"tidegate_{name.removeprefix('torch_')}", FUNCTIONS[name])
            found[f"{layer.__module__}.{name}"] = choice
    if not found:
        where = ", ".join(sorted(layer.__name__ for layer in layers)) or "a model without linear-attention layers"
        raise tidegate.errors.NothingPatchedError(
            f"function_mapping: {where} calls none of {', '.join(FUNCTIONS)} by a global name: "
            "use mapping(), which also serves releases that keep them on the layers"
        )
    _mark(model)
    return found


def handle(model):
    """The handle of the patch that kernelize made; None if there is none."""
    return existing_handle(core(model))


def register_experts():
    """Puts our experts into twinkle's list for expert parallelism, if this version of Tidegate has them."""
    experts = getattr(tidegate, "experts_forward", None)
    if experts is None:
        return False
    ep = importlib.import_module("twinkle.kernel.ops.ep")
    impls = ep._get_impls()
    if not any(impl.name == "tidegate" for impl in impls):

        class TidegateExperts(ep.EpExpertsGmm):
            name = "tidegate"

            def ineligible_reason(self, experts_mod):
                device = next(experts_mod.parameters()).device.type
                return None if device == "cpu" else f"parameters are on {device}"

            def forward(self, experts_mod, permuted_tokens, num_global_sum_tokens_per_local_expert, experts_per_rank):
                return experts(experts_mod, permuted_tokens, num_global_sum_tokens_per_local_expert, experts_per_rank)

        impls.insert(0, TidegateExperts())
    return True


def cpu_platform():
    """Makes the CPU the platform that twinkle finds when nothing else is asked for. Returns what takes it back."""
    Platform = importlib.import_module("twinkle.utils.platforms").Platform
    found = Platform.__dict__["get_platform"]

    class CPU(Platform):
        visible_device_env = staticmethod(lambda: "")
        device_prefix = staticmethod(lambda: "cpu")
        get_local_device = staticmethod(lambda idx, **kwargs: "cpu")
        device_backend = staticmethod(lambda platform=None: "gloo")
        get_device_rng_state = staticmethod(lambda: None)
        set_device_rng_state = staticmethod(lambda state: None)

    def get_platform(platform=None):
        return CPU if platform is None or platform.upper() == "CPU" else found.__func__(platform)

    Platform.get_platform = staticmethod(get_platform)
    return lambda: setattr(Platform, "get_platform", found)

"""From what a user holds to the modules inside: trainers' objects, PEFT, DDP, compiled modules, and readable paths."""

from torch import nn

WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # of torch's own wrappers
HOLDERS = ("model", "module")  # where an object that is no module keeps one


def as_module(model):
    """The nn.Module that was given, or the one inside a trainer's object."""
    if isinstance(model, nn.Module):
        return model
    for name in HOLDERS:
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return inner
    tried = ", ".join(f".{name}" for name in HOLDERS)
    raise TypeError(
        f"expected a torch.nn.Module or an object that holds one as {tried}, got {type(model).__name__}: "
        "pass the model itself"
    )


def _unwrap_once(module):
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return module.module
    if isinstance(getattr(module, "_orig_mod", None), nn.Module):  # torch.compile
        return module._orig_mod
    if callable(getattr(module, "get_base_model", None)):  # peft
        return module.get_base_model()
    return module


def core(model):
    """The model without the wrappers around it, so that paths are the same with and without them."""
    module = as_module(model)
    while (inner := _unwrap_once(module)) is not module:
        module = inner
    return module


def named_modules(root):
    """(path, module) of every module once, without the parts that torch's wrappers add to paths."""
    for path, module in root.named_modules():
        yield ".".join(part for part in path.split(".") if part not in WRAPPER_PARTS), module


def foreign_device(module):
    """The first device of a module's own or deeper parameters that is neither the CPU nor meta, or None."""
    for parameter in module.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            return parameter.device
    return None


def is_sharded(tensor):
    """Whether a parameter is a DTensor, told without importing torch.distributed.tensor."""
    return type(tensor) is not nn.Parameter and hasattr(tensor, "device_mesh")


def unreadable(module):
    """Why a module's parameters cannot be read here and now, or None: meta (offloaded), fake or sharded."""
    for parameter in module.parameters():
        if parameter.device.type == "meta":
            return "meta"
        if hasattr(parameter, "fake_mode"):
            return "fake"
        if is_sharded(parameter):
            return "sharded"
    return None


def class_names(root, most=20):
    """Names of the classes in a model, for messages."""
    names = list(dict.fromkeys(type(module).__name__ for module in root.modules()))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def linear_layers(root):
    """How many linear-attention layers the configuration promises; None if it says nothing."""
    config = getattr(root, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    types = getattr(text, "layer_types", None)
    return None if types is None else list(types).count("linear_attention")

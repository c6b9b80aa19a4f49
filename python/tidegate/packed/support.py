"""Which models can run packed input: every part that carries something from token to token must be known and ours."""

import inspect

from torch import nn

from tidegate.packed.attention import NAME

TEXT_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
MIXERS = {"linear_attn", "self_attn"}
TOKENWISE = {"mlp", "feed_forward"}


def text_models(root):
    """(path, module) of the modules that own the embeddings and the layers of a text model with linear attention."""
    for path, module in root.named_modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and isinstance(getattr(module, "embed_tokens", None), nn.Module):
            if any(hasattr(layer, "linear_attn") for layer in layers) or _may_be_linear(module):
                yield path, module


def _may_be_linear(module):
    """A family with linear attention whose layers all happen to be full attention."""
    return hasattr(getattr(module, "config", None), "linear_num_value_heads")


def structure_refusal(text_model):
    """Why the parts of a text model are not known to keep sequences apart; empty if they are."""
    for name, child in text_model.named_children():
        if name not in TEXT_MODEL:
            return f"{name} ({type(child).__name__}) is not known to keep sequences apart"
    for i, layer in enumerate(text_model.layers):
        for name, child in layer.named_children():
            if name not in MIXERS | TOKENWISE and "norm" not in name:
                return f"layers.{i}.{name} ({type(child).__name__}) is not known to keep sequences apart"
        mixer = getattr(layer, "linear_attn", None)
        if mixer is not None and not hasattr(mixer, "conv1d"):
            return f"layers.{i}.linear_attn ({type(mixer).__name__}) convolves q, k and v in modules of their own"
        attention = getattr(layer, "self_attn", None)
        if attention is not None and not uses_registry(attention):
            return f"layers.{i}.self_attn ({type(attention).__name__}) does not call Transformers' attention functions"
    return ""


def uses_registry(attention):
    """Whether an attention module takes its core from Transformers' registry, by the name in its config."""
    forward = inspect.unwrap(type(attention).forward)
    return "ALL_ATTENTION_FUNCTIONS" in getattr(forward, "__globals__", {}) and hasattr(attention, "config")


def hands_keywords_on(layer):
    """Whether a decoder layer gives its keyword arguments to its linear attention. Both learned it in one release."""
    parameters = inspect.signature(type(layer.linear_attn).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _is_patched(mixer):
    return any(
        getattr(mixer.__dict__.get(name), "tidegate", None) == "gdn_layer" for name in ("forward", "_old_forward")
    )


def state_refusal(text_model):
    """Why packed input cannot run as the model is patched now; empty if it can. Asked in every packed forward."""
    for i, layer in enumerate(text_model.layers):
        mixer = getattr(layer, "linear_attn", None)
        if mixer is not None and not _is_patched(mixer):
            return (
                f"layers.{i}.linear_attn is not patched; patch with the op gdn_layer, or again if its forward was lost"
            )
        if mixer is None and layer.self_attn.config._attn_implementation != NAME:
            found = layer.self_attn.config._attn_implementation
            return f"full attention runs {found!r}, which does not see boundaries; patch with the op attention"
    return ""

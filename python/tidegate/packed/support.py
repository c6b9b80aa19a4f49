"""Which models can run packed input: every part that carries something from token to token must be known and ours."""

import inspect

import torch
from torch import nn

from tidegate.packed.attention import PATCHED
from tidegate.patch.gdn_ops import as_attributes, replacements
from tidegate.patch.site import foreign_forward, record_of

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


def structure_refusal(text_model, options):
    """Why the parts of a text model are not known to keep sequences apart; empty if they are."""
    for switch in ("gdn_conv", "gdn_chunk"):
        if not options.on(switch):
            return options.why_off(switch)
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


@torch.compiler.assume_constant_result
def _unserved(text_model, options):
    """Why a model's own code, calling our functions, does not keep sequences apart; empty if it does."""
    functions = as_attributes(replacements(options))
    for i, layer in enumerate(text_model.layers):
        mixer = getattr(layer, "linear_attn", None)
        if mixer is None:
            continue
        if not hands_keywords_on(layer):
            return "decoder layers of this release keep the boundaries from linear attention; tidegate.patch the model"
        kept = ((mixer.__dict__[name], function) for name, function in functions.items() if name in mixer.__dict__)
        if foreign_forward(mixer) or any(getattr(value, "function", value) is not function for value, function in kept):
            return f"layers.{i}.linear_attn does not call our functions; tidegate.patch the model"
    return structure_refusal(text_model, options)


def stock_refusal(text_model, options):
    """Why packed input cannot run in a model that only has our functions: its full attention is Transformers' own."""
    chosen = text_model.config._attn_implementation
    if chosen not in ("sdpa", "eager"):
        return f"full attention runs {chosen!r}, which is not known to see boundaries; tidegate.patch the model"
    return _unserved(text_model, options)


def _mixer_refusal(layer, mixer):
    record = record_of(mixer)
    site = None if record is None else record.sites.get("gdn_layer")
    if site is None or not site.installed or not (torch.compiler.is_compiling() or site.intact()):
        return "is not patched; patch with the op gdn_layer, or again if its forward was lost"
    if not getattr(site, "tokenwise", True):
        return "gives a token another value when other tokens are beside it, as quantised activations do"
    if record_of(layer) is not None and not site.mechanism.startswith("I"):  # see _layer_forward in sites.py
        return "runs the model's own code, which takes no boundaries in this release; leave the option gdn_layer on"
    return ""


def state_refusal(text_model):
    """Why packed input cannot run as the model is patched now; empty if it can. Asked in every packed forward."""
    for i, layer in enumerate(text_model.layers):
        mixer = getattr(layer, "linear_attn", None)
        if mixer is not None:
            why = _mixer_refusal(layer, mixer)
            if why:
                return f"layers.{i}.linear_attn {why}"
        elif layer.self_attn.config._attn_implementation != PATCHED:
            found = layer.self_attn.config._attn_implementation
            return f"full attention runs {found!r}, which does not see boundaries; patch with the op attention"
    return ""

"""How the linear-attention layers of the known families differ: projections, names, options."""

import dataclasses
from collections.abc import Callable

import torch

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "olmo_hybrid")


@dataclasses.dataclass(frozen=True)
class FamilySpec:
    """project(layer, x) -> (mixed [B,T,C] in the order q, k, v; z [B,T,HV*V]; a, b [B,T,HV]); the other names follow.

    step(layer, x) gives mixed, z, a, b for the one-call decode in the form that `projection` names.
    """

    project: Callable
    step: Callable
    projection: str = "qkv"
    convs: tuple = ("conv1d",)
    norm: str = "norm"
    out: str = "out_proj"
    needs: tuple = ()


def _project_qkv(layer, x):
    return layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_a(x), layer.in_proj_b(x)


def _step_qkvz(layer, x):
    return layer.in_proj_qkvz(x), None, None, layer.in_proj_ba(x)


def _project_qkvz(layer, x):
    """Of every key head: q, k, its values, its z; and its b, its a."""
    mixed, z, a, b = _step_qkvz(layer, x)
    group, K, V = layer.num_v_heads // layer.num_k_heads, layer.head_k_dim, layer.head_v_dim
    mixed = mixed.unflatten(-1, (layer.num_k_heads, -1))
    b = b.unflatten(-1, (layer.num_k_heads, -1))
    q, k, v, z = mixed.split((K, K, group * V, group * V), -1)
    b, a = b.split((group, group), -1)
    return torch.cat((q.flatten(-2), k.flatten(-2), v.flatten(-2)), -1), z.flatten(-2), a.flatten(-2), b.flatten(-2)


def _project_split(layer, x):
    mixed = torch.cat((layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)), -1)
    return mixed, layer.g_proj(x), layer.a_proj(x), layer.b_proj(x)


_SPLIT = dict(norm="o_norm", out="o_proj", needs=("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj"))
SPECS = (
    FamilySpec(_project_qkv, _project_qkv, needs=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
    FamilySpec(_project_qkvz, _step_qkvz, projection="qkvz_ba", needs=("in_proj_qkvz", "in_proj_ba")),
    FamilySpec(_project_split, _project_split, **_SPLIT),
    FamilySpec(_project_split, _project_split, convs=("q_conv1d", "k_conv1d", "v_conv1d"), **_SPLIT),
)
SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size", "layer_idx")


def family_of(module):
    """The Transformers family that a module's class, or a class it derives from, belongs to; None if unknown."""
    for base in type(module).__mro__:
        parts = base.__module__.split(".")
        if parts[:2] == ["transformers", "models"] and len(parts) > 2 and parts[2] in FAMILIES:
            return parts[2]
    return None


def spec_of(module):
    """The spec that a layer's parts fit, or None."""
    for spec in SPECS:
        parts = (*spec.needs, *spec.convs, spec.norm, spec.out, *SIZES, "A_log", "dt_bias")
        if all(hasattr(module, name) for name in parts):
            return spec
    return None


def norm_eps(norm):
    """The epsilon of a norm module, under whichever of its names."""
    for name in ("variance_epsilon", "eps", "epsilon"):
        if hasattr(norm, name):
            return getattr(norm, name)
    return None


def misfit(module, spec):
    """Why the fused forward cannot serve a layer that has the right parts, or None."""
    convs = [getattr(module, name) for name in spec.convs]
    norm = getattr(module, spec.norm)
    activation = getattr(module, "activation", "silu")
    if activation not in ("silu", "swish"):
        return f"activation of the convolution is {activation}, not silu"
    if getattr(norm, "activation", "silu") not in ("silu", "swish", "sigmoid"):
        return f"activation of the gated norm is {norm.activation}, not silu or sigmoid"
    if norm_eps(norm) is None or getattr(norm, "weight", None) is None:
        return "the gated norm has no weight or no epsilon"
    channels = 2 * module.num_k_heads * module.head_k_dim + module.num_v_heads * module.head_v_dim
    if sum(conv.weight.shape[0] for conv in convs) != channels:  # a meta or sharded weight has its full shape too
        return f"the convolution has {sum(conv.weight.shape[0] for conv in convs)} channels, expected {channels}"
    if not all(2 <= conv.weight.shape[-1] <= 4 and conv.weight.shape[1] == 1 for conv in convs):
        return f"the convolution is not depthwise with 2 to 4 taps: weight {list(convs[0].weight.shape)}"
    if module.num_v_heads % module.num_k_heads:
        return f"{module.num_v_heads} value heads are no multiple of {module.num_k_heads} key heads"
    return None

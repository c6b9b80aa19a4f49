"""Mixture of experts: router, grouped products, the experts of a layer, and the experts function for Transformers."""

import torch

from tidegate._native import isa, ops
from tidegate.delta_rule import _trains
from tidegate.weight_cache import cache_of, is_computed

TURNING_ROWS = 12  # an expert with more rows than this has its weights turned in every call, unless they are already
NAME = "tidegate"  # in Transformers' registry of experts functions


def moe_route(
    logits: torch.Tensor,
    k: int,
    renormalise: bool = True,
    weights_dtype: torch.dtype | None = None,
    logits_rounding: torch.dtype | None = None,
    replay_ids: torch.Tensor | None = None,
    return_probs: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The k experts of every token and their weights: (ids int32 [T,k], weights [T,k]), and probs [T,E] if asked for.

    Ids are ranked by the logits, the lowest id first among equal ones, so they do not depend on batch or threads.
    replay_ids [T,k] is a choice made before: weights and gradients are then those of the present logits.
    """
    weights, ids, probs = ops.moe_route_fwd(
        logits,
        replay_ids,
        top_k=k,
        renormalise=renormalise,
        logits_rounding=logits_rounding,
        weights_dtype=weights_dtype,
        output_probs=return_probs,
    )
    return (ids, weights, probs) if return_probs else (ids, weights)


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    weight_axes: str = "nk",
    group_list: str = "counts",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y[j] = W_g x[j] for the rows of group g; rows outside all groups are 0.

    groups [G] holds counts or their cumsum. weight is [G,N,K] ("nk") or [G,K,N] ("kn"); a transposed view is used as
    it is, never copied.
    """
    return ops.grouped_matmul_fwd(
        x, weight, groups, bias, weight_axes=weight_axes, group_list=group_list, out_dtype=out_dtype
    )


def _low_rank(name, lora):
    if lora is None:
        return None, None, 1.0
    if not isinstance(lora, (tuple, list)) or len(lora) != 3:
        got = f"{len(lora)} items" if isinstance(lora, (tuple, list)) else type(lora).__name__
        raise ValueError(f"moe_experts: {name}: expected (a, b, scale), got {got}")
    return lora


def moe_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate: torch.Tensor | None = None,
    shared_up: torch.Tensor | None = None,
    shared_down: torch.Tensor | None = None,
    shared_router: torch.Tensor | None = None,
    *,
    gate_up_lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    down_lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    weight_axes: str = "nk",
    interleaved: bool = False,
    ids_convention: str = "plain",
    round_y: bool = False,
) -> torch.Tensor:
    """sum over slots of weights * down(silu(gate x) * (up x)), plus sigmoid(<shared_router, x>) times a shared expert.

    x [T,H], ids and weights [T,k], gate_up [E,2I,H], down [E,H,I] as models store them; id -1 is nobody.
    gate_up_lora and down_lora, (a [E,r,K], b [E,N,r], scale), add scale b a to a weight [N,K] without forming it.
    Where a backward may follow, gate and up of all pairs are kept for it: T k 2I fp32 numbers.
    """
    gate_up_a, gate_up_b, gate_up_scale = _low_rank("gate_up_lora", gate_up_lora)
    down_a, down_b, down_scale = _low_rank("down_lora", down_lora)
    out, _ = ops.moe_experts_fwd(
        x,
        ids,
        weights,
        gate_up,
        down,
        shared_gate,
        shared_up,
        shared_down,
        shared_router,
        gate_up_a,
        gate_up_b,
        down_a,
        down_b,
        weight_axes=weight_axes,
        interleaved=interleaved,
        ids_convention=ids_convention,
        gate_up_lora_scale=gate_up_scale,
        down_lora_scale=down_scale,
        round_y=round_y,
        save_hidden=_trains(x, weights, gate_up, down, gate_up_a, gate_up_b, down_a, down_b),
    )
    return out


def _is_silu(act):
    return isinstance(act, torch.nn.SiLU) or act is torch.nn.functional.silu or type(act).__name__ == "SiLUActivation"


def why_not(module: torch.nn.Module) -> str | None:
    """Why experts_forward cannot run a Transformers experts module; None if it can."""
    for flag, expected in (("has_gate", True), ("has_bias", False), ("has_post_expert_norm", False)):
        value = getattr(module, flag, expected)
        if value != expected:
            return f"{flag}: expected {expected}, got {value}"
    for name in ("gate_up_proj", "down_proj"):
        if not isinstance(getattr(module, name, None), torch.Tensor):
            return f"{name}: expected a tensor, got {type(getattr(module, name, None)).__name__}"
    apply_gate = getattr(type(module), "_apply_gate", None)
    if apply_gate is not None and apply_gate.__name__ != "_default_apply_gate":
        return "_apply_gate: expected the default silu(gate) * up, got one of the module's own"
    if not _is_silu(getattr(module, "act_fn", None)):
        return f"act_fn: expected SiLU, got {type(getattr(module, 'act_fn', None)).__name__}"
    if not getattr(module, "is_concatenated", True):
        return "is_concatenated: expected True, got False"
    return None


def stored_or_copied(module, x, ids, weights, lora=None):
    """gate_up, down and their axes: the parameters, or copies of them in the order that suits many rows an expert."""
    stored = module.gate_up_proj, module.down_proj, "kn" if getattr(module, "is_transposed", False) else "nk"
    cache = cache_of(module)
    if cache is None or stored[2] == "kn" or ids.numel() <= TURNING_ROWS * stored[0].shape[0]:
        return stored
    if isa() == "avx512_bf16" and stored[0].dtype == stored[1].dtype == x.dtype == torch.bfloat16:
        return stored  # its kernel takes them as they stand for any number of rows; a copy would gain nothing
    wanted = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad or lora)
    if wanted or torch.compiler.is_compiling() or is_computed(module):
        return stored
    turned = [
        cache.get(name, w, lambda w: w.mT.contiguous()) for name, w in zip(("gate_up", "down"), stored, strict=False)
    ]
    return stored if None in turned else (*turned, "kn")


def experts_forward(
    self,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    **lora: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> torch.Tensor:
    """The experts function of Transformers: hidden_states [T,H], top_k_index and top_k_weights [T,k].

    lora: gate_up_lora and down_lora of moe_experts.
    """
    reason = why_not(self)
    if reason is not None:
        raise ValueError(f"tidegate: {type(self).__name__}: {reason}")
    # Ids of other ranks are num_experts; releases without the flag always read them so.
    foreign = getattr(self, "_is_expert_parallel", True)
    gate_up, down, axes = stored_or_copied(self, hidden_states, top_k_index, top_k_weights, lora)
    return moe_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        gate_up,
        down,
        weight_axes=axes,
        ids_convention="transformers_ep" if foreign else "plain",
        **lora,
    )


def register_experts() -> None:
    """Makes "tidegate" a name for model.set_experts_implementation(); again is harmless."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)

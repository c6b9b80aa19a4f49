"""Sparse blocks with a shared expert: routed and shared experts in one call where no gradient is wanted.

The router stays a module. Everything else of the block is one operator then, with one rounding at the end; with
gradients, hooks, adapters or sharding on any part the block runs as it is, over the parts that are patched one by one.
"""

import torch
import torch.nn.functional as F
from torch.nn.modules.module import _has_any_global_hook

from tidegate import _native, moe
from tidegate._native import ops
from tidegate.packed.step import is_plain_inference
from tidegate.patch.moe import WEIGHTS, is_experts
from tidegate.patch.resolve import named_modules
from tidegate.patch.site import ForwardSite, Site, call_original, foreign_forward, is_our_forward
from tidegate.patch.swiglu import FORMS as MLP_FORMS
from tidegate.patch.swiglu import activation_problem, shape

OP = "sparse_moe"
PARTS = ("gate", "experts", "shared_expert", "shared_expert_gate")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _stock(self, hidden_states: torch.Tensor) -> torch.Tensor:
    batch_size, sequence_length, hidden_dim = hidden_states.shape
    hidden_states_reshaped = hidden_states.view(-1, hidden_dim)
    shared_expert_output = self.shared_expert(hidden_states_reshaped)
    _, routing_weights, selected_experts = self.gate(hidden_states_reshaped)
    expert_output = self.experts(hidden_states_reshaped, selected_experts, routing_weights)

    shared_expert_output = F.sigmoid(self.shared_expert_gate(hidden_states_reshaped)) * shared_expert_output

    expert_output = expert_output + shared_expert_output
    expert_output = expert_output.reshape(batch_size, sequence_length, hidden_dim)
    return expert_output


FORM = shape(_stock.__code__)


# What follows runs in every decode step, on cold caches: it reads the dictionaries of modules instead of asking them.


def _is_untouched(module):
    """Whether a call of a module runs its class's forward, or one of ours, and nothing else."""
    inside = getattr(module, "__dict__", {})  # an activation may be a function
    if inside.get("_forward_hooks") or inside.get("_forward_pre_hooks") or "_hf_hook" in inside:
        return False
    own = inside.get("forward")
    return own is None or is_our_forward(own, module) or getattr(own, "__func__", None) is type(module).forward


def _is_plain(weight, x):
    plain = type(weight) is torch.nn.Parameter or type(weight) is torch.Tensor
    return plain and weight.dtype is x.dtype and weight.device == x.device


def _act_of(module):
    return module._modules.get("act_fn", module.__dict__.get("act_fn"))


def _code_of(block):
    """What the parts of a block run. It must be what it was when the block was looked at."""
    mlp, experts = block._modules["shared_expert"], block._modules["experts"]
    acts = [_act_of(mlp), _act_of(experts)]
    called = [type(part) for part in (mlp, experts, *acts)]
    # A copy has activations of its own; one that is a function is the same in every copy.
    functions = [None if isinstance(act, torch.nn.Module) else act for act in acts]
    return (
        *called,
        *functions,
        *[(kind.__call__, getattr(kind, "forward", None)) for kind in (*called, torch.nn.Linear)],
    )


def _shared(block, x):
    """The weights of the shared expert, or None if something else stands between them and the input."""
    mlp = block._modules["shared_expert"]
    parts = mlp._modules
    linears = *(parts.get(name) for name in PROJECTIONS), block._modules["shared_expert_gate"]
    weights = []
    for linear in linears:
        if type(linear) is not torch.nn.Linear or not _is_untouched(linear):
            return None
        weight, bias = linear._parameters.get("weight"), linear._parameters.get("bias")
        if bias is not None or not _is_plain(weight, x) or not weight.is_contiguous():
            return None
        weights.append(weight)
    if not _is_untouched(mlp) or not _is_untouched(_act_of(mlp)):
        return None
    return *weights[:3], weights[3][0]


def _routed(block, x):
    """The routed experts, if a call of them is nothing but ours."""
    experts = block._modules["experts"]
    served = (
        getattr(experts.__dict__.get("config"), "_experts_implementation", None) == moe.NAME
        and "forward" not in experts.__dict__
        and not experts.__dict__.get("_is_expert_parallel")
        and _is_untouched(experts)
        and _is_untouched(_act_of(experts))
        and all(_is_plain(experts._parameters.get(name), x) for name in WEIGHTS)
    )
    return experts if served else None


def forward(self, hidden_states):
    plain = (
        not torch.is_grad_enabled()
        and is_plain_inference(hidden_states)
        and hidden_states.dim() == 3
        and not _has_any_global_hook()
        and _code_of(self) == self._tidegate.sites[OP].code
    )
    experts = _routed(self, hidden_states) if plain else None
    shared = _shared(self, hidden_states) if experts is not None else None
    if shared is None:
        return call_original(self, OP, hidden_states)
    rows = hidden_states.view(-1, hidden_states.shape[-1])
    _, weights, ids = self.gate(rows)
    gate_up, down, axes = moe.stored_or_copied(experts, rows, ids, weights)
    out, _ = ops.moe_experts_fwd(rows, ids, weights, gate_up, down, *shared, weight_axes=axes)
    return out.view(hidden_states.shape)


class BlockSite(ForwardSite):
    """`code`: what the parts ran when the block was looked at."""

    code = None

    def remarks(self):
        chosen = getattr(self.module.experts.__dict__.get("config"), "_experts_implementation", None)
        return self.reason or ("" if chosen == moe.NAME else "waits for the op experts")


def _refusal(module, options):
    other = foreign_forward(module)
    if other is not None:
        return f"forward already replaced by {other}"
    if shape(getattr(type(module).forward, "__code__", None)) != FORM:
        return "its forward is not that of Qwen3.5-MoE: the parts are patched one by one"
    mlp_code = getattr(type(module.shared_expert).forward, "__code__", None)
    if shape(mlp_code) not in MLP_FORMS:
        return "its shared expert is not down_proj(act_fn(gate_proj(x)) * up_proj(x)) alone"
    if not options.on("gmm"):
        return f"needs the op experts: {options.why_off('gmm')}"
    return moe.why_not(module.experts) or activation_problem(module.shared_expert.act_fn)


def find(root, options):
    sites = []
    if _native.fallback:  # the model's own experts are as fast there
        return sites
    for path, module in named_modules(root):
        parts = [getattr(module, name, None) for name in PARTS]
        if any(part is None for part in parts) or not is_experts(parts[1]) or "config" not in parts[1].__dict__:
            continue
        reason = _refusal(module, options)
        if reason is not None:
            sites.append(Site(path, OP, module).refuse(reason))
            continue
        site = BlockSite(path, OP, module, "I:block", forward)
        site.code = _code_of(module)
        sites.append(site)
    return sites


find.ops = (OP,)

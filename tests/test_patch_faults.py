"""Modules that look like what we replace and compute something else; and blocks whose experts alone are replaced."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, linear, silu

pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from test_patch_models import T32, stock  # noqa: E402

import tidegate  # noqa: E402
from tidegate.errors import NothingPatchedError, SelfTestError  # noqa: E402
from tidegate.patch.moe import is_experts  # noqa: E402

native = pytest.mark.skipif(tidegate.isa() == "fallback", reason="patch leaves experts to the model")


def gelu_mlp(self, x):
    return self.down_proj(gelu(self.gate_proj(x)) * self.up_proj(x))


def swapped_mlp(self, x):
    return self.down_proj(self.gate_proj(x) * silu(self.up_proj(x)))


@pytest.mark.parametrize("forward", [gelu_mlp, swapped_mlp])
def test_an_mlp_is_what_it_was(forward):
    """Three projections do not make an MLP with silu(gate) * up: it is refused, and the rest is patched."""
    models = stock("qwen3_5", layers=2), tiny.build("qwen3_5", layers=2)
    for model in models:
        for layer in model.model.layers:
            layer.mlp.__class__ = type("MLP", (type(layer.mlp),), {"forward": forward})
    handle = tidegate.patch(models[1])
    rows = [row for row in handle.report() if row.path.endswith("mlp")]
    assert all(row.status == "refused" and "its forward is not" in row.reason for row in rows)
    assert len(rows) == (0 if tidegate.isa() == "fallback" else 2)
    ids = tiny.tokens()
    expected = tiny.logits(models[0], ids)
    assert tiny.relative(tiny.logits(models[1], ids), expected) < T32
    assert tiny.relative(tiny.logits(stock("qwen3_5", layers=2), ids), expected) > 0.01  # it is another function


def with_experts(fault, decorated=True, dtype=torch.float32):
    """A model whose experts run plain torch, right or wrong. 2 I == H: a shape says nothing."""
    from transformers.integrations.moe import use_experts_implementation

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for t, slot in itertools.product(*map(range, top_k_index.shape)):
            gate_up, down = (w[top_k_index[t, slot]] for w in (self.gate_up_proj, self.down_proj))
            gate, up = linear(hidden_states[t], gate_up.T if fault == "transposed" else gate_up).chunk(2)
            gate, up = (up, gate) if fault == "swapped" else (gate, up)
            out[t] += top_k_weights[t, slot] * linear((gelu if fault == "gelu" else silu)(gate) * up, down)
        return out

    model = tiny.build("qwen3_5_moe", layers=2, dtype=dtype, experts_implementation="eager", moe_intermediate_size=16)
    for module in model.modules():
        if is_experts(module):
            kind = type("Experts", (type(module),), {"forward": forward})
            module.__class__ = use_experts_implementation(kind) if decorated else kind
    return model


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", [None, "gelu", "swapped", "transposed"])
def test_experts_that_compute_something_else(fault, dtype):
    """Names, flags and shapes are right: only the numbers tell."""
    model = with_experts(fault, dtype=dtype)
    if fault is None:
        assert tidegate.patch(model, ops="experts").installed
        return
    with pytest.raises(SelfTestError, match="self-test, experts: the result differs by"):
        tidegate.patch(model, ops="experts")
    row = tidegate.patch(model, strict=False).report().only(op="experts")[0]
    assert row.status == "refused" and "differs by" in row.reason
    assert model.config._experts_implementation == "eager"


def test_experts_that_do_not_ask_the_registry():
    with pytest.raises(NothingPatchedError, match="does not ask Transformers' registry"):
        tidegate.patch(with_experts(None, decorated=False), ops="experts")


class Router(nn.Linear):
    """What newer releases have: logits, weights and ids."""

    def forward(self, x):
        logits = super().forward(x)
        return (logits, *route(logits, x.dtype))


def route(logits, dtype):
    weights, ids = logits.float().softmax(-1).topk(2, -1)
    return (weights / weights.sum(-1, keepdim=True)).to(dtype), ids


class Block(nn.Module):
    """A sparse block of either generation: the gate gives a tuple or a tensor, the block one tensor or two."""

    def __init__(self, experts, tuple_gate, shared):
        super().__init__()
        hidden, count = experts.gate_up_proj.shape[-1], experts.num_experts
        self.experts, self.gate = experts, (Router if tuple_gate else nn.Linear)(hidden, count, bias=False)
        if shared:
            self.shared_expert = nn.Sequential(nn.Linear(hidden, 8), nn.SiLU(), nn.Linear(8, hidden))
            self.shared_expert_gate = nn.Linear(hidden, 1)

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        routed = self.gate(x)
        old = isinstance(routed, torch.Tensor)
        logits, weights, ids = (routed, *route(routed, x.dtype)) if old else routed
        out = self.experts(x, ids, weights)
        if hasattr(self, "shared_expert"):
            out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        out = out.view(hidden_states.shape)
        return (out, logits) if old else out


@native
@pytest.mark.parametrize("tuple_gate", [True, False], ids=["tuple", "tensor"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "alone"])
def test_blocks_of_both_generations(monkeypatch, tuple_gate, shared):
    from tidegate import moe

    calls, real = [], moe.moe_experts
    monkeypatch.setattr(moe, "moe_experts", lambda *args, **kwargs: calls.append(0) or real(*args, **kwargs))
    experts = next(m for m in tiny.build("qwen3_5_moe", layers=2).modules() if is_experts(m))
    block, x = Block(experts, tuple_gate, shared), torch.randn(2, 7, 32)

    def run():
        out = block(x)
        parts = (out,) if isinstance(out, torch.Tensor) else out
        return parts, torch.autograd.grad(sum(p.square().sum() for p in parts), list(block.parameters()))

    expected = run()
    with tidegate.patch(block, ops="experts"):
        calls.clear()
        got = run()
        assert calls == [0]
    assert len(got[0]) == len(expected[0]) == (1 if tuple_gate else 2)  # router logits stay, for the auxiliary loss
    for one, other in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
        assert tiny.relative(one, other) < T32

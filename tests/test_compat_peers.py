"""Against the real packages, where they are installed. They are optional: Tidegate needs neither."""

import inspect

import pytest
import torch
from compare import assert_bits, assert_close, error
from delta_rule_case import INPUTS, LAYOUTS, make, truth

import tidegate
from tidegate import fla


@pytest.fixture
def qwen():
    return pytest.importorskip(
        "transformers.models.qwen3_5.modeling_qwen3_5", reason="transformers with qwen3_5 is optional and not installed"
    )


@pytest.fixture
def real_fla():
    """The functions of the installed flash-linear-attention by our names."""
    pytest.importorskip("fla.modules", reason="flash-linear-attention is optional and not installed")
    from fla.modules import FusedRMSNormGated
    from fla.modules.convolution import causal_conv1d, causal_conv1d_update
    from fla.modules.fused_norm_gate import rms_norm_gated
    from fla.modules.l2norm import l2norm
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, chunk_gdn
    from fla.ops.gated_delta_rule.gate import fused_gdn_gate

    functions = (FusedRMSNormGated, causal_conv1d, causal_conv1d_update, fused_gdn_gate, l2norm, rms_norm_gated)
    rule = {"chunk_gated_delta_rule": chunk_gated_delta_rule, "chunk_gdn": chunk_gdn}
    return {f.__name__: f for f in functions} | rule


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_fla_signatures(real_fla):
    assert set(real_fla) == set(fla.__all__)
    for name, function in real_fla.items():
        assert parameters(getattr(fla, name)) == parameters(function), name
    assert parameters(fla.FusedRMSNormGated.forward) == parameters(real_fla["FusedRMSNormGated"].forward)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_gated_norm_of_qwen(qwen, isa, weight_dtype):
    theirs = qwen.Qwen3_5RMSNormGated(128).to(weight_dtype)
    torch.nn.init.normal_(theirs.weight)
    ours = tidegate.RMSNormGated(128).to(weight_dtype)
    ours.load_state_dict(theirs.state_dict())
    x, z = torch.randn(4000, 128).bfloat16(), torch.randn(4000, 128).bfloat16()
    with torch.no_grad():
        got, want = ours(x, z), theirs(x, z)
    steps = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    # Sums and exponentials in another order move a value across a rounding border once in 10^5.
    assert steps.max() <= 1 and (steps != 0).sum() <= 8, f"{int((steps != 0).sum())} of {steps.numel()} differ"


def test_block_norm_of_qwen(qwen, isa):
    theirs = qwen.Qwen3_5RMSNorm(256).to(torch.bfloat16)
    torch.nn.init.normal_(theirs.weight)
    x = torch.randn(2000, 256).bfloat16()
    with torch.no_grad():
        got, want = tidegate.rms_norm(x, theirs.weight), theirs(x)
    steps = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert steps.max() <= 1 and (steps != 0).sum() <= 8, f"{int((steps != 0).sum())} of {steps.numel()} differ"


@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_rope_of_qwen(qwen, isa, layout):
    angle = torch.rand(2, 33, 32) * 1000
    angle = torch.cat([angle, angle], -1)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    q, k = torch.randn(2, 8, 33, 256).bfloat16(), torch.randn(2, 2, 33, 256).bfloat16()
    if layout == "BSND":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    inputs = [[t.detach().clone().requires_grad_() for t in (q, k)] for _ in range(2)]
    got = tidegate.partial_rope(*inputs[0], cos, sin, layout=layout)
    want = qwen.apply_rotary_pos_emb(*inputs[1], cos, sin, unsqueeze_dim=1 if layout == "BNSD" else 2)
    for name, ours, theirs, a, b in zip(("q", "k"), got, want, *inputs, strict=True):
        assert_bits(name, ours, theirs)
        dy = torch.randn(ours.shape).bfloat16()
        ours.backward(dy)
        theirs.backward(dy)
        assert_bits("d" + name, a.grad, b.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("G", [1, 2])
def test_delta_rule_of_qwen(qwen, isa, dtype, G):
    """Called as the layer calls it: q and k repeated to the value heads, keywords after value."""
    p = make([150], HK=2, G=G, K=64, V=48, dtype=dtype)
    raw = p | {"q": p["q"] * 4, "k": p["k"] * 4}
    q, k, v, g, beta = (LAYOUTS["BSND"](raw[name]) for name in INPUTS)
    options = {"initial_state": p["h0"], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    repeated = [t.repeat_interleave(G, 2) for t in (q, k)]
    plain = inspect.unwrap(qwen.torch_chunk_gated_delta_rule)  # not the GPU code that stands in for it with FLA
    theirs = plain(*repeated, v, g=g, beta=beta, **options)
    ours = tidegate.chunk_gated_delta_rule(*repeated, v, g=g, beta=beta, **options)
    grouped = tidegate.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, **options)
    unit = {name: torch.nn.functional.normalize(raw[name].double(), dim=-1) for name in ("q", "k")}
    o, final = truth(p | unit)
    for name, got, same, want, peer in zip(
        ("o", "final state"), ours, grouped, (LAYOUTS["BSND"](o), final), theirs, strict=True
    ):
        assert got.dtype == peer.dtype and got.shape == peer.shape
        assert_bits(name, same, got)
        assert_close(name, got, want, 1e-6)
        assert error(got, want) <= 2 * error(peer, want)


@pytest.mark.parametrize("state", [False, True])
def test_delta_rule_of_fla(real_fla, isa, state):
    """Its plain recurrence; the fast one needs a GPU."""
    from fla.ops.gated_delta_rule import naive_recurrent_gated_delta_rule

    p = make([90], HK=2, G=1, K=32, V=48, initial=state)
    q, k, v, g, beta = (LAYOUTS["BSND"](p[name]) for name in INPUTS)
    options = {"initial_state": p["h0"], "output_final_state": True}
    theirs = naive_recurrent_gated_delta_rule(q, k, v, beta, g, **options)
    ours = tidegate.chunk_gated_delta_rule(q, k, v, g, beta, **options)
    for name, got, want in zip(("o", "final state"), ours, theirs, strict=True):
        assert got.dtype == want.dtype
        assert_close(name, got, want, 1e-6)

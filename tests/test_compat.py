"""tidegate.fla and tidegate.causal_conv1d: the signatures, results and exceptions of the packages they stand in for."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from compare import assert_bits, assert_close, leaves

import tidegate
from tidegate import causal_conv1d as cc
from tidegate import fla

SIGNATURES = {
    fla.causal_conv1d: "(x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, "
    "activation=None, backend='triton', cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, "
    "**kwargs)",
    fla.causal_conv1d_update: "(x, cache, residual=None, weight=None, bias=None, activation=None)",
    fla.chunk_gated_delta_rule: "(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, "
    "use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, "
    "cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs)",
    fla.fused_recurrent_gated_delta_rule: "(q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, "
    "initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
    "A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, "
    "cu_seqlens=None, **kwargs)",
    fla.l2norm: "(x, eps=1e-06, output_dtype=None)",
    fla.fused_gdn_gate: "(g, A_log, dt_bias=None, output_dtype=torch.float32)",
    fla.rms_norm_gated: "(x, g, weight, bias, activation='swish', residual=None, prenorm=False, "
    "residual_in_fp32=False, eps=1e-06)",
    fla.FusedRMSNormGated: "(hidden_size, elementwise_affine=True, eps=1e-05, activation='swish', device=None, "
    "dtype=None)",
    fla.FusedRMSNormGated.forward: "(self, x, g, residual=None, prenorm=False, residual_in_fp32=False)",
    cc.causal_conv1d_fn: "(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, "
    "final_states_out=None, activation=None)",
    cc.causal_conv1d_update: "(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, "
    "conv_state_indices=None)",
}


def names_and_defaults(function):
    """A signature without its types, which callers do not depend on."""
    found = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def conv(x, w, b=None, history=None, activation=None):
    """x [.., D, T] through torch's own convolution; history [.., D, W-1] stands in front of it."""
    W = w.shape[1]
    x = F.pad(x, (W - 1, 0)) if history is None else torch.cat([history, x], -1)
    y = F.conv1d(x, w[:, None], b, groups=w.shape[0])
    return F.silu(y) if activation else y


def problem(B=2, T=9, D=12, W=4):
    return torch.randn(B, T, D), torch.randn(D, W), torch.randn(D)


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__}.{f.__qualname__}")
def test_signature(function):
    assert names_and_defaults(function) == SIGNATURES[function]


@pytest.mark.parametrize("module", [fla, cc])
def test_every_public_function_has_a_signature_here(module):
    assert {getattr(module, name) for name in module.__all__} <= set(SIGNATURES)


# --- flash-linear-attention: convolution -----------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_fla_conv(activation):
    x, w, b = problem()
    state = torch.randn(2, 12, 4)
    y, final = fla.causal_conv1d(x, w, b, initial_state=state, output_final_state=True, activation=activation)
    want = conv(x.transpose(1, 2), w, b, state[..., 1:], activation).transpose(1, 2)
    assert_close("y", y, want, 1e-6)
    assert_bits("final state", final, torch.cat([state, x.transpose(1, 2)], -1)[..., -4:].contiguous())
    assert fla.causal_conv1d(x, w, b)[1] is None
    assert fla.causal_conv1d(x, w, output_final_state=True)[1].shape == (2, 12, 4)


def test_fla_conv_packed_and_residual():
    x, w, _ = problem(B=1)
    residual, cu = torch.randn(1, 9, 12), torch.tensor([0, 2, 2, 9], dtype=torch.int32)
    parts = [conv(x[0, s:e].T, w, activation="silu").T for s, e in ((0, 2), (2, 9))]
    for given in ({"cu_seqlens": cu}, {"cu_seqlens": cu, "cu_seqlens_cpu": cu.long()}):
        for backend in ("triton", "cuda", "mix"):
            y, _ = fla.causal_conv1d(x, w, None, residual, activation="silu", backend=backend, **given)
            assert_close("y", y[0], torch.cat(parts) + residual[0], 1e-6)
    assert_bits("y", fla.causal_conv1d(x, w, cu_seqlens_cpu=cu)[0], fla.causal_conv1d(x, w)[0])
    for size in (16, 32, 64, 128):
        long, ends = torch.randn(1, 130, 12), torch.tensor([0, 65, 130])
        chunks = [[n, c] for n in range(2) for c in range(-(-65 // size))]
        fla.causal_conv1d(long, w, cu_seqlens=ends, chunk_indices=torch.tensor(chunks))


FLA_CONV_ERRORS = {
    "cu_seqlens with two rows": (ValueError, {"cu_seqlens": torch.tensor([0, 9])}),
    "cu_seqlens decreasing": (ValueError, {"cu_seqlens": torch.tensor([0, 5, 3, 9]), "rows": 1}),
    "cu_seqlens not from 0": (ValueError, {"cu_seqlens": torch.tensor([1, 9]), "rows": 1}),
    "cu_seqlens short": (ValueError, {"cu_seqlens": torch.tensor([0, 8]), "rows": 1}),
    "two cu_seqlens": (
        ValueError,
        {"cu_seqlens": torch.tensor([0, 9]), "cu_seqlens_cpu": torch.tensor([0, 3, 9]), "rows": 1},
    ),
    "number of states": (ValueError, {"initial_state": torch.zeros(3, 12, 4)}),
    "other chunk list": (
        ValueError,
        {"cu_seqlens": torch.tensor([0, 9]), "chunk_indices": torch.ones(1, 2), "rows": 1},
    ),
    "list of boundaries": (TypeError, {"cu_seqlens": [0, 9], "rows": 1}),
    "list as second boundaries": (TypeError, {"cu_seqlens_cpu": [0, 9], "rows": 1}),
    "text as chunk list": (TypeError, {"cu_seqlens": torch.tensor([0, 9]), "chunk_indices": "0", "rows": 1}),
    "activation": (ValueError, {"activation": "gelu"}),
    "backend": (ValueError, {"backend": "cpu"}),
    "unknown argument": (TypeError, {"head_first": True}),
    "no weight": (ValueError, {"weight": None}),
    "weight without dimensions": (ValueError, {"weight": torch.tensor(1.0), "output_final_state": True}),
    "no x": (ValueError, {"x": None}),
    "residual that would spread": (ValueError, {"residual": torch.zeros(12)}),
    "residual elsewhere": (ValueError, {"residual": torch.zeros(2, 9, 12, device="meta")}),
    "dtype of residual": (TypeError, {"residual": torch.zeros(2, 9, 12, dtype=torch.int32)}),
    "text as residual": (TypeError, {"residual": "x"}),
    "context parallel": (ValueError, {"cp_context": object()}),
    "context parallel with a state": (AssertionError, {"cp_context": object(), "initial_state": torch.zeros(2, 12, 4)}),
    "context parallel with a final state": (AssertionError, {"cp_context": object(), "output_final_state": True}),
}


@pytest.mark.parametrize("case", FLA_CONV_ERRORS)
def test_fla_conv_errors(case):
    kind, changes = FLA_CONV_ERRORS[case]
    x, w, _ = problem(B=changes.get("rows", 2))
    with pytest.raises(kind):
        fla.causal_conv1d(**({"x": x, "weight": w} | {k: v for k, v in changes.items() if k != "rows"}))


@pytest.mark.parametrize("shape", [(3, 12), (1, 3, 12), (3, 1, 12)])
def test_fla_conv_update(shape):
    x, w, b, residual = torch.randn(shape), torch.randn(12, 4), torch.randn(12), torch.randn(shape)
    cache = torch.randn(3, 12, 4)
    rolled = torch.cat([cache[..., 1:], x.reshape(3, 12, 1)], -1)
    y, returned = fla.causal_conv1d_update(x, cache, residual, w, b, "swish")
    want = F.silu((rolled * w).sum(-1) + b).view(shape) + residual
    assert_close("y", y, want, 1e-6)
    assert returned is cache
    assert_bits("cache", cache, rolled)


@pytest.mark.parametrize("shape", [(12, 3), (4, 12), (2, 2, 12), (36,), (1, 1, 3, 12)])
def test_fla_conv_update_errors(shape):
    with pytest.raises(ValueError, match="causal_conv1d_update: x: expected"):
        fla.causal_conv1d_update(torch.randn(shape), torch.randn(3, 12, 4), weight=torch.randn(12, 4))


FLA_UPDATE_ERRORS = {
    "activation": (ValueError, {"activation": "gelu"}),
    "no weight": (ValueError, {"weight": None}),
    "no x": (ValueError, {"x": None}),
    "no cache": (ValueError, {"cache": None}),
    "rank of cache": (ValueError, {"cache": torch.zeros(12, 4)}),
    "residual": (ValueError, {"residual": torch.zeros(5, 3, 12)}),
    "text as residual": (TypeError, {"residual": "x"}),
}


@pytest.mark.parametrize("case", FLA_UPDATE_ERRORS)
def test_fla_conv_update_arguments(case):
    kind, bad = FLA_UPDATE_ERRORS[case]
    x, cache, w = torch.randn(3, 12), torch.randn(3, 12, 4), torch.randn(12, 4)
    before = cache.clone()
    with pytest.raises(kind, match="causal_conv1d_update: "):
        fla.causal_conv1d_update(**({"x": x, "cache": cache, "weight": w} | bad))
    assert_bits("cache", cache, before)


# --- flash-linear-attention: l2norm, gate, gated norm ----------------------------------------------------------------


def test_fla_l2norm():
    (x,) = leaves(torch.randn(2, 3, 5, 64).bfloat16())
    want = x.detach().double() / (x.detach().double().square().sum(-1, keepdim=True) + 1e-5).sqrt()
    assert_close("y", fla.l2norm(x, 1e-5), want, 1e-6)
    wide = fla.l2norm(x, eps=1e-5, output_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert_close("y", wide, want, 1e-6)
    wide.sum().backward()
    assert x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(7,), (2, 5, 7), (2, 3, 4, 7)])
def test_fla_gate(shape):
    g, A_log, dt_bias = leaves(torch.randn(shape), torch.rand(7), torch.randn(7))
    want = -A_log.exp() * F.softplus(g + dt_bias)
    got = fla.fused_gdn_gate(g, A_log, dt_bias)
    assert_close("g", got, want, 1e-6)
    dy = torch.randn(shape)
    for x, y in zip(*(torch.autograd.grad(t, (g, A_log, dt_bias), dy) for t in (got, want)), strict=True):
        assert_close("gradient", x, y, 2e-6)
    assert fla.fused_gdn_gate(g.bfloat16(), A_log, output_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert fla.fused_gdn_gate(g.bfloat16(), A_log).dtype == torch.float32


def test_fla_gate_errors():
    g, A_log = torch.randn(3, 7), torch.rand(7)
    for bad in ({"g": None}, {"A_log": None}, {"g": torch.tensor(1.0)}):
        with pytest.raises(ValueError, match="fused_gdn_gate: "):
            fla.fused_gdn_gate(**({"g": g, "A_log": A_log} | bad))
    with pytest.raises(TypeError, match="fused_gdn_gate: output_dtype: expected a floating dtype"):
        fla.fused_gdn_gate(g, A_log, output_dtype=torch.int32)
    assert fla.fused_gdn_gate(torch.randn(3, 0), torch.rand(0)).shape == (3, 0)


def gated(x, g, weight, activation, eps):
    x, g = x.double(), g.double()
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * weight.double()
    return y * (g.sigmoid() if activation == "sigmoid" else F.silu(g))


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_fla_gated_norm(activation):
    x, g, residual = torch.randn(2, 5, 3, 16).bfloat16(), torch.randn(2, 5, 3, 16), torch.randn(2, 5, 3, 16)
    layer = fla.FusedRMSNormGated(16, activation=activation)
    torch.nn.init.normal_(layer.weight)
    for gate in (g, g.bfloat16()):  # a gate in another type is not rounded
        assert_close("y", layer(x, gate), gated(x, gate, layer.weight, activation, 1e-5), 1e-6)
    assert layer(x, g).dtype == torch.bfloat16 and layer.bias is None
    for res, fp32 in ((residual, False), (residual.bfloat16(), True)):
        y, total = layer(x, g, res, prenorm=True, residual_in_fp32=fp32)
        assert_close("y", y, gated(x.double() + res, g, layer.weight, activation, 1e-5), 1e-6)
        assert_bits("residual", total, (x.float() + res.float()).to(res.dtype))
    assert layer(x, g, prenorm=True)[1] is x
    assert_bits("residual", layer(x, g, prenorm=True, residual_in_fp32=True)[1], x.float())
    plain = fla.FusedRMSNormGated(16, elementwise_affine=False, activation=activation)
    assert plain.weight is None
    assert_close("y", plain(x, g), gated(x, g, None, activation, 1e-5), 1e-6)


def test_fla_gated_norm_gradients():
    inputs = leaves(*[torch.randn(4, 16) for _ in range(3)], torch.randn(16))
    x, g, residual, weight = inputs
    y, total = fla.rms_norm_gated(x, g, weight, None, residual=residual, prenorm=True)
    want = gated(x + residual, g, weight, "swish", 1e-6)
    dy, dt = torch.randn(4, 16), torch.randn(4, 16)
    got = torch.autograd.grad([y, total], inputs, [dy, dt])
    expected = torch.autograd.grad([want, x + residual], inputs, [dy.double(), dt])
    for a, b in zip(got, expected, strict=True):
        assert_close("gradient", a, b, 1e-6)


def test_fla_gated_norm_errors():
    x = torch.randn(4, 16)
    with pytest.raises(ValueError):
        fla.FusedRMSNormGated(16, activation="relu")
    with pytest.raises(ValueError):
        fla.rms_norm_gated(x, x, None, None, activation="relu")
    with pytest.raises(ValueError):
        fla.rms_norm_gated(x, x, None, torch.zeros(16))
    with pytest.raises(ValueError, match="rms_norm_gated: g: expected a tensor"):
        fla.rms_norm_gated(x, None, None, None)
    with pytest.raises(ValueError, match="rms_norm_gated: residual: expected shape"):
        fla.rms_norm_gated(x, x, None, None, residual=x[0])


def test_layer_like_transformers():
    layer = tidegate.RMSNormGated(16)
    assert list(layer.state_dict()) == ["weight"] and names_and_defaults(layer.forward) == "(hidden_states, gate)"
    assert tidegate.RMSNormGated(16, fp32=True).fp32 and not layer.fp32

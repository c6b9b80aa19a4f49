"""tidegate.fused_recurrent_gated_delta_rule: results, warnings and exceptions of flash-linear-attention's function."""

import inspect

import pytest
import torch
from compare import assert_bits, assert_close
from delta_rule_case import INPUTS, LAYOUTS, case

import tidegate
from tidegate import fla
from tidegate import fused_recurrent_gated_delta_rule as rule

CU = torch.tensor([0, 5, 5, 20], dtype=torch.int32)


def problem(**sizes):
    """q, k, v, g, beta as [1, T, H, D], the states of the sequences, and the truth."""
    p, (o, final) = case((5, 0, 15), HK=2, K=20, V=36, **sizes)
    return [LAYOUTS["BSND"](p[name]) for name in INPUTS], p["h0"], (LAYOUTS["BSND"](o), final)


def naive(q, k, v, beta, g, S):
    """The recurrence as flash-linear-attention's naive function has it, for equal head counts; fp32."""
    S, out = S.clone(), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        d = (v[:, t] - (S * k[:, t, ..., None]).sum(-2)) * beta[:, t, ..., None]
        S = S + k[:, t, ..., None] * d[..., None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[-1] ** -0.5, S))
    return torch.stack(out, 1), S


def test_signature():
    names = (
        "q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel A_log "
        "dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens kwargs"
    )
    parameters = inspect.signature(rule).parameters
    assert list(parameters) == names.split()
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    switches = {name for name in defaults if name.startswith(("use_", "output_", "allow_", "state_v"))}
    assert all(value is (False if name in switches else None) for name, value in defaults.items())
    assert fla.fused_recurrent_gated_delta_rule is rule and tidegate.fused_recurrent_gdn is rule


def test_results(isa, dtype):
    (q, k, v, g, beta), h0, (o, final) = problem(dtype=dtype)
    got = rule(q, k, v, g, beta=beta, initial_state=h0, output_final_state=True, cu_seqlens=CU)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    assert_close("o", got[0], o, 5e-7)
    assert_close("final state", got[1], final, 1e-6)
    alone = rule(q, k, v, g, None, None, beta, 20**-0.5, h0, cu_seqlens=CU)
    assert alone[1] is None
    assert_bits("o", alone[0], got[0])
    flipped = rule(
        q, k, v, g, beta=beta, initial_state=h0.mT, output_final_state=True, cu_seqlens=CU, state_v_first=True
    )
    assert_close("o", flipped[0], o, 5e-7)
    assert_close("final state", flipped[1].mT, final, 1e-6)


def test_the_naive_recurrence(isa):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 9, 3, 16), torch.randn(2, 9, 3, 16), torch.randn(2, 9, 3, 24)
    g, beta, h0 = -torch.rand(2, 9, 3), torch.rand(2, 9, 3), torch.randn(2, 3, 16, 24)
    unit = [torch.nn.functional.normalize(t, dim=-1) for t in (q, k)]
    want = naive(*unit, v, beta, g, h0)
    got = rule(q, k, v, g, beta=beta, initial_state=h0, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert_close("o", got[0], want[0], 2e-6)  # FLA's naive function is fp32 itself
    assert_close("state", got[1], want[1], 2e-6)


def test_optional_gates(isa):
    (q, k, v, g, beta), h0, _ = problem()
    plain = {"initial_state": h0, "output_final_state": True, "cu_seqlens": CU}
    want = rule(q, k, v, torch.zeros_like(g), beta=torch.ones_like(beta), **plain)
    got = rule(q, k, v, **plain)  # no decay, and beta = 1 for every value head
    assert_bits("o", got[0], want[0])
    assert_bits("state", got[1], want[1])
    channels = rule(q, k, v, g, beta=beta[..., None].expand_as(v), **plain)
    assert_bits("o", channels[0], rule(q, k, v, g, beta=beta, **plain)[0])


def test_everything_inside(isa):
    (q, k, v, g, beta), h0, _ = problem()
    a, b, A_log, dt_bias = torch.randn_like(g), torch.randn_like(beta), torch.rand(4) - 2, torch.randn(4)
    options = {"initial_state": h0, "output_final_state": True, "cu_seqlens": CU}
    decay = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    want = rule(q, k, v, decay, beta=2 * b.sigmoid(), **options)
    inside = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    negative = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    got = rule(q, k, v, a, beta=b, **inside, **negative, **options)
    assert_close("o", got[0], want[0], 1e-6)
    assert_close("state", got[1], want[1], 1e-6)
    # As in flash-linear-attention, parameters of the gate are ignored where it is not formed inside.
    assert_bits("o", rule(q, k, v, g, beta=beta, A_log=A_log)[0], rule(q, k, v, g, beta=beta)[0])


def test_inputs_are_not_changed_and_16_bit_states_are_widened():
    (q, k, v, g, beta), h0, _ = problem()
    half = h0.bfloat16()
    before = half.clone()
    got = rule(q, k, v, g, beta=beta, initial_state=half, output_final_state=True, cu_seqlens=CU)
    want = rule(q, k, v, g, beta=beta, initial_state=half.float(), output_final_state=True, cu_seqlens=CU)
    assert_bits("given", half, before)
    assert_bits("state", got[1], want[1])


def test_exceptions():
    (q, k, v, g, beta), h0, _ = problem()
    with pytest.raises(ValueError, match="cu_seqlens: expected none with more than one row"):
        rule(*(t.repeat(2, *[1] * (t.dim() - 1)) for t in (q, k, v, g)), cu_seqlens=CU)
    with pytest.raises(ValueError, match="initial_state: expected 3 states"):
        rule(q, k, v, g, initial_state=h0[:2], cu_seqlens=CU)
    with pytest.raises(ValueError, match="q: expected shape"):
        rule(q[:, :, :1], k, v, g)
    with pytest.raises(ValueError, match="v: expected a multiple of 2"):
        rule(q, k, v[:, :, :3], g[..., :3])
    with pytest.raises(ValueError, match="A_log: expected a tensor"):
        rule(q, k, v, g, use_gate_in_kernel=True)
    with pytest.raises(ValueError, match=": g: expected a tensor"):
        rule(q, k, v, use_gate_in_kernel=True, A_log=torch.zeros(4))
    with pytest.raises(ValueError, match="allow_neg_eigval"):
        rule(q, k, v, g, allow_neg_eigval=True)
    with pytest.raises(ValueError, match="gv: expected None"):
        rule(q, k, v, g, gv=torch.zeros_like(v))
    with pytest.raises(TypeError, match="unexpected arguments"):
        rule(q, k, v, g, chunk_size=64)
    with pytest.raises(ValueError, match="transpose_state_layout"):
        rule(q, k, v, g, state_v_first=True, transpose_state_layout=True)
    with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`"):
        rule(q, k, v, g, initial_state=h0.mT, cu_seqlens=CU, transpose_state_layout=True)


def test_compiled():
    (q, k, v, g, beta), h0, _ = problem()
    call = lambda: rule(q, k, v, g, beta=beta, initial_state=h0, output_final_state=True, cu_seqlens=CU)  # noqa: E731
    want = call()
    torch._dynamo.reset()
    got = torch.compile(call, fullgraph=True, backend="aot_eager")()
    assert_bits("o", got[0], want[0])
    assert_bits("state", got[1], want[1])

"""flash-linear-attention on the CPU through its own names, over the grid of its tests for the gated delta rule."""

import os
import pathlib
import subprocess
import sys

import golden
import pytest
import torch
import torch.nn.functional as F
from compare import assert_close, leaves

import tidegate

pytest.importorskip("fla.backends", reason="flash-linear-attention is not installed")
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update  # noqa: E402
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, naive_recurrent_gated_delta_rule  # noqa: E402

# Ratios of norms that FLA's own tests allow.
LIMITS = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def registered():
    yield tidegate.register()
    tidegate.unregister()


def problem(B, T, H, HV, D, dtype, gate_range=1.0, mask=0.0):
    q, k = torch.randn(B, T, H, D).to(dtype), F.normalize(torch.randn(B, T, H, D), dim=-1).to(dtype)
    v, beta = torch.randn(B, T, HV, D).to(dtype), torch.rand(B, T, HV).sigmoid().to(dtype)
    g = F.logsigmoid(torch.rand(B, T, HV)) / gate_range * (torch.rand(B, T, HV) > mask)
    return leaves(q, k, v, g, beta, torch.randn(B, HV, D, D))


def reference(q, k, v, g, beta, h0, cu=None, scale=None, l2=False):
    """FLA's own recurrence in fp64, sequence by sequence."""
    cu = cu or [0, q.shape[1]]
    q, k = (F.normalize(x.double(), dim=-1) if l2 else x.double() for x in (q, k))
    q, k, v, g, beta, h0 = (x.double() for x in (q, k, v, g, beta, h0))
    parts, states = [], []
    for b in range(q.shape[0]):
        for n, (i, j) in enumerate(zip(cu, cu[1:], strict=False)):
            rows = [x[b, i:j].transpose(0, 1) for x in (q, k, v, g, beta)]
            o, h = golden.gated_delta_rule(
                *rows, [0, j - i], h0[max(b, n)][None], q.shape[-1] ** -0.5 if scale is None else scale
            )
            parts.append(o.transpose(0, 1))
            states.append(h)
    o = torch.cat(parts)[None] if len(cu) > 2 else torch.stack(parts)
    return o, torch.cat(states)


def compare(call, inputs, dtype, cu=None, **options):
    wide = leaves(*inputs)
    o, state = call(*inputs[:5], initial_state=inputs[5], output_final_state=True, **options)
    want, want_state = reference(*wide, cu=cu, scale=options.get("scale"), l2=options.get("use_qk_l2norm_in_kernel"))
    do, dstate = torch.randn_like(o), torch.randn_like(state)
    torch.autograd.backward([o, state], [do, dstate])
    torch.autograd.backward([want, want_state], [do.double(), dstate.double()])
    limit = LIMITS[dtype] / 10  # their limits are for other arithmetic; ours is far inside
    assert_close("o", o.detach(), want.detach(), limit)
    assert_close("state", state.detach(), want_state.detach(), limit)
    for name, x, y in zip(("dq", "dk", "dv", "dg", "dbeta", "dh0"), inputs, wide, strict=True):
        assert_close(name, x.grad, y.grad, limit)


GRID = [  # B, T, H, HV, D, scale, gate range, share of closed gates, dtype
    (2, 75, 2, 2, 64, 1.0, 1.0, 0.0, torch.float16),
    (1, 63, 1, 1, 64, 1.0, 1.0, 0.0, torch.float32),
    (2, 100, 2, 2, 60, 1.0, 1.0, 0.0, torch.float16),
    (1, 130, 2, 4, 128, 0.1, 1.0, 0.0, torch.float16),
    (2, 90, 2, 4, 128, 1.0, 0.1, 0.0, torch.float16),
    (1, 128, 2, 4, 128, 1.0, 10.0, 0.5, torch.float16),
    (2, 70, 2, 2, 100, 1.0, 0.1, 0.0, torch.bfloat16),
    (1, 64, 2, 8, 64, 0.1, 1.0, 0.0, torch.bfloat16),
    (2, 75, 2, 2, 64, 1.0, 0.01, 0.0, torch.float16),  # decays of e^-70 a token
    (2, 70, 2, 2, 64, 0.1, 1.0, 1.0, torch.float16),  # no decay at all
    (1, 300, 1, 3, 32, 0.1, 10.0, 0.0, torch.float16),  # five chunks
]


@pytest.mark.parametrize("B, T, H, HV, D, scale, gate_range, mask, dtype", GRID)
def test_chunk(B, T, H, HV, D, scale, gate_range, mask, dtype):
    inputs = problem(B, T, H, HV, D, dtype, gate_range, mask)
    compare(chunk_gated_delta_rule, inputs, dtype, scale=scale, use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize(
    "D, mask, cu, dtype",
    [
        (60, 0.1, [0, 15], torch.float16),
        (64, 0.9, [0, 2, 71], torch.float16),
        (100, 0.5, [0, 25, 50, 100], torch.float16),
        (128, 0.0, [0, 15, 100, 130], torch.float32),
    ],
)
def test_chunk_with_varied_lengths(D, mask, cu, dtype):
    q, k, v, g, beta, _ = problem(1, cu[-1], 2, 4, D, dtype, mask=mask)
    inputs = [q, k, v, g, beta, *leaves(torch.randn(len(cu) - 1, 4, D, D))]
    compare(chunk_gated_delta_rule, inputs, dtype, cu=cu, cu_seqlens=torch.tensor(cu))


def test_gates_inside_and_v_first():
    q, k, v, a, b, h0 = problem(2, 70, 2, 4, 64, torch.float32)
    A_log, dt_bias = leaves(torch.randn(4), torch.randn(4))
    options = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "state_v_first": True}
    o, state = chunk_gated_delta_rule(
        q, k, v, a, b, initial_state=h0.mT, output_final_state=True, use_beta_sigmoid_in_kernel=True, **options
    )
    g = -A_log.double().exp() * F.softplus(a.double() + dt_bias.double())
    want, want_state = reference(q, k, v, g, b.double().sigmoid(), h0)
    assert_close("o", o.detach(), want.detach(), 1e-5)
    assert_close("state", state.detach().mT, want_state.detach(), 1e-5)


OPTIONS = [  # H, HV, D, norm of q and k, state [V,K], boundaries, gates, beta, dtype: each where the function does it
    (2, 2, 64, False, False, None, None, None, torch.float16),  # nothing inside
    (2, 2, 60, False, True, None, None, None, torch.float16),
    (2, 4, 64, True, False, None, "bias", None, torch.float16),
    (1, 4, 32, False, False, None, "plain", None, torch.float16),
    (2, 2, 60, True, False, [0, 15], "bias", None, torch.float16),
    (2, 2, 64, True, False, [0, 25, 50, 110], "plain", None, torch.float16),
    (2, 4, 64, False, False, None, None, "sigmoid", torch.float16),
    (2, 4, 32, True, False, None, None, "doubled", torch.float16),
    (2, 4, 64, True, True, [0, 7, 7, 70], "bias", "doubled", torch.float32),
    (1, 3, 64, True, True, None, "bias", "sigmoid", torch.bfloat16),
]


@pytest.mark.parametrize("H, HV, D, l2, v_first, cu, gate, beta, dtype", OPTIONS)
def test_chunk_with_options(H, HV, D, l2, v_first, cu, gate, beta, dtype):
    """All gradients, those of A_log and dt_bias too. As in FLA's tests only packs start from states that are not 0."""
    inputs = problem(2 if cu is None else 1, 70 if cu is None else cu[-1], H, HV, D, dtype)
    inputs[4] = inputs[4].float() if beta is None else torch.randn(inputs[4].shape)  # FLA's tests give it in fp32
    inputs[5] = torch.randn(inputs[0].shape[0] if cu is None else len(cu) - 1, HV, D, D) * (cu is not None)
    options = {"use_qk_l2norm_in_kernel": l2, "scale": 0.1, "state_v_first": v_first, "output_final_state": True}
    if gate is not None:
        inputs[3] = torch.randn(inputs[3].shape)
        inputs += [torch.randn(HV), *([torch.randn(HV)] if gate == "bias" else [])]
    ours, wide = leaves(*inputs), leaves(*(x.detach().double() for x in inputs))
    if gate is not None:
        options |= {"use_gate_in_kernel": True, "A_log": ours[6], "dt_bias": ours[7] if gate == "bias" else None}
    if beta is not None:
        options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": beta == "doubled"}
    options |= {} if cu is None else {"cu_seqlens": torch.tensor(cu)}
    h0 = ours[5].mT.contiguous() if v_first else ours[5]
    o, state = chunk_gated_delta_rule(*ours[:5], initial_state=h0, **options)
    state = state.mT if v_first else state
    decay, write = wide[3], wide[4]
    if gate is not None:
        decay = -wide[6].exp() * F.softplus(decay + wide[7] if gate == "bias" else decay)
    if beta is not None:
        write = write.sigmoid() * (2 if beta == "doubled" else 1)
    want, want_state = reference(*wide[:3], decay, write, wide[5], cu=cu, scale=0.1, l2=l2)
    do, dstate = torch.randn_like(o), torch.randn_like(state)
    torch.autograd.backward([o, state], [do, dstate])
    torch.autograd.backward([want, want_state], [do.double(), dstate.double()])
    assert o.dtype == dtype and state.dtype == torch.float32
    limit = LIMITS[dtype] / 10
    assert_close("o", o.detach(), want.detach(), limit)
    assert_close("state", state.detach(), want_state.detach(), limit)
    for name, x, y in zip((*"qkvgbh", "A_log", "dt_bias"), ours, wide, strict=False):
        assert_close(f"gradient of {name}", x.grad, y.grad, limit)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_the_former_name_of_v_first(name):
    import fla.ops.gated_delta_rule as rules

    call = getattr(rules, name)
    q, k, v, g, beta, h0 = (x.detach() for x in problem(2, 9, 2, 4, 16, torch.float32))
    options = {"g": g, "beta": beta, "initial_state": h0.mT.contiguous(), "output_final_state": True}
    want = call(q, k, v, **options, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        got = call(q, k, v, **options, transpose_state_layout=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    with pytest.raises(ValueError, match="transpose_state_layout"):
        call(q, k, v, **options, state_v_first=True, transpose_state_layout=True)


RECURRENT = [  # H, HV, D, scale, gate range, dtype of v and beta, state [V,K], boundaries, gates inside, beta inside
    (1, 1, 64, 0.1, 1.0, torch.float32, False, None, None, None),
    (2, 8, 60, 0.1, 1.0, torch.float32, True, None, None, "doubled"),
    (2, 4, 128, 0.1, 1.0, torch.float16, False, None, "bias", None),
    (2, 4, 64, 0.1, 1.0, torch.float16, True, [0, 15, 15, 60], "plain", "doubled"),
    (2, 8, 64, 1.0, 0.1, torch.float32, False, None, None, None),
    (3, 3, 64, 1.0, 10.0, torch.float16, False, None, None, "sigmoid"),
    (2, 2, 64, 0.1, 1.0, torch.float16, False, [0, 15, 60], "bias", None),
]


@pytest.mark.parametrize("H, HV, D, scale, gate_range, dtype, v_first, cu, gate, inside", RECURRENT)
def test_recurrent(H, HV, D, scale, gate_range, dtype, v_first, cu, gate, inside):
    """q and k in fp32 whatever v is, as FLA's tests call it; o has the type of v."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    q, k, v, g, beta, h0 = (x.detach() for x in problem(2 if cu is None else 1, 60, H, HV, D, dtype, gate_range))
    q, k, h0 = q.float(), k.float(), h0 if cu is None else torch.randn(len(cu) - 1, HV, D, D)
    options, decay, write = {"use_qk_l2norm_in_kernel": True, "scale": scale, "state_v_first": v_first}, g, beta
    if gate is not None:
        A_log, dt_bias = torch.rand(HV), torch.randn(HV) if gate == "bias" else None
        decay = -A_log.exp() * F.softplus(g if dt_bias is None else g + dt_bias)
        options |= {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    if inside is not None:
        write = beta.float().sigmoid() * (2 if inside == "doubled" else 1)
        options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": inside == "doubled"}
    options |= {} if cu is None else {"cu_seqlens": torch.tensor(cu)}
    given = h0.mT.contiguous() if v_first else h0
    o, state = fused_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=given, output_final_state=True, **options
    )
    want, want_state = reference(q, k, v, decay, write, h0, cu=cu, scale=scale, l2=True)
    assert o.dtype == dtype and state.dtype == torch.float32
    assert_close("o", o, want, LIMITS[dtype] / 10)
    assert_close("state", state.mT if v_first else state, want_state, LIMITS[dtype] / 10)


def test_chunk_in_narrow_types_and_inference_mode():
    """Decays and states in fp16 beside beta in fp32; without gradients the same bits."""
    cu = [0, 15, 80]
    q, k, v, g, beta, _ = (x.detach() for x in problem(1, 80, 2, 4, 60, torch.float16))
    inputs = leaves(q, k, v, g.half(), beta.float(), torch.randn(2, 4, 60, 60).half())
    compare(chunk_gated_delta_rule, inputs, torch.float16, cu=cu, cu_seqlens=torch.tensor(cu))
    call = dict(initial_state=inputs[5], output_final_state=True, cu_seqlens=torch.tensor(cu))
    with torch.inference_mode():
        got = chunk_gated_delta_rule(*inputs[:5], **call)
    want = chunk_gated_delta_rule(*inputs[:5], **call)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("bias", [True, False])
def test_gate(bias):
    from fla.ops.gated_delta_rule.gate import fused_gdn_gate, naive_gdn_gate

    inputs = [torch.randn(2, 33, 4), torch.rand(4), *([torch.randn(4)] if bias else [])]
    ours, theirs, dy = leaves(*inputs), leaves(*(x.double() for x in inputs)), torch.randn(2, 33, 4)
    got, want = fused_gdn_gate(*ours), naive_gdn_gate(*theirs)
    got.backward(dy)
    want.backward(dy.to(want.dtype))
    assert_close("g", got.detach(), want.detach(), 1e-6)
    for name, one, other in zip(("dg", "dA_log", "ddt_bias"), ours, theirs, strict=False):
        assert_close(name, one.grad, other.grad, 1e-6)


def test_recurrent_is_replaced_where_it_was_imported():
    import fla.ops
    import fla.ops.gated_delta_rule as rules

    q, k, v, g, beta, h0 = (x.detach() for x in problem(2, 9, 2, 4, 60, torch.float16))
    for module in (rules, fla.ops):
        o, state = module.fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=h0, output_final_state=True
        )
        want, want_state = reference(q, k, v, g, beta, h0)
        assert_close("o", o, want, 5e-4)
        assert_close("state", state, want_state, 5e-4)
    tidegate.unregister()
    with pytest.raises(Exception, match="drivers|Triton|CUDA|cpu"):
        rules.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)
    with pytest.raises(Exception, match="drivers|Triton|CUDA|cpu"):
        chunk_gated_delta_rule(q, k, v, g, beta)


def test_naive_recurrence_of_fla_agrees():
    q, k, v, g, beta, h0 = (x.detach() for x in problem(2, 30, 2, 2, 64, torch.float32))
    want, state = naive_recurrent_gated_delta_rule(q, k, v, beta, g, initial_state=h0, output_final_state=True)
    got, final = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=h0, output_final_state=True)
    assert_close("o", got, want, 1e-5)
    assert_close("state", final, state, 1e-5)


@pytest.mark.parametrize("activation", [None, "swish"])
@pytest.mark.parametrize("cu", [None, [0, 7, 7, 40]])
def test_convolution(activation, cu):
    B, T, D = (2, 20, 12) if cu is None else (1, 40, 12)
    x, weight, bias, residual = leaves(torch.randn(B, T, D), torch.randn(D, 4), torch.randn(D), torch.randn(B, T, D))
    wide = leaves(*(t.double() for t in (x, weight, bias, residual)))
    options = {"activation": activation, "output_final_state": True}
    y, final = causal_conv1d(x, weight, bias, residual, cu_seqlens=None if cu is None else torch.tensor(cu), **options)
    rows, finals = [], []
    for b in range(B):
        # FLA's states have W columns; the oldest is not read.
        h0 = wide[0].new_zeros(1 if cu is None else len(cu) - 1, D, 4)
        part, _, last = golden.causal_conv1d_fwd(wide[0][b], wide[1], wide[2], cu, h0, activation)
        rows.append(part + wide[3][b])
        finals.append(last)
    dy = torch.randn_like(y)
    y.backward(dy)
    want = torch.stack(rows)
    want.backward(dy.double())
    assert_close("y", y.detach(), want.detach(), 1e-6)
    assert_close("final", final.detach(), torch.cat(finals).detach(), 1e-6)
    for name, got, truth in zip(
        ("dx", "dweight", "dbias", "dresidual"), (x, weight, bias, residual), wide, strict=True
    ):
        assert_close(name, got.grad, truth.grad, 1e-6)


def test_convolution_step():
    x, cache, weight = torch.randn(3, 1, 8), torch.randn(3, 8, 4), torch.randn(8, 4)
    want = tidegate.fla.causal_conv1d_update(x, cache.clone(), weight=weight, activation="silu")
    got = causal_conv1d_update(x, cache, weight=weight, activation="silu")
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_report_and_repeat(registered):
    assert tidegate.register() is registered
    assert "chunk_gated_delta_rule" in registered["flash-linear-attention"]
    assert "causal_conv1d_bwd" in str(registered)


def test_wrong_calls_are_refused_not_passed_on():
    q, k, v, g, beta, _ = (x.detach() for x in problem(1, 9, 2, 4, 16, torch.float32))
    with pytest.raises(ValueError, match="cu_seqlens"):
        chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=torch.tensor([0, 20]))
    with pytest.raises(ValueError, match="expected"):
        chunk_gated_delta_rule(q, k, v, g[:, :4], beta)


def test_disabled_dispatch_is_reported():
    code = "import tidegate; print(tidegate.register()['flash-linear-attention'])"
    env = {**os.environ, "FLA_DISABLE_BACKEND_DISPATCH": "1"}
    path = [str(pathlib.Path(tidegate.__file__).parents[1]), str(pathlib.Path(sys.modules["fla"].__file__).parents[1])]
    env["PYTHONPATH"] = os.pathsep.join([*path, env.get("PYTHONPATH", "")])
    text = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True).stdout
    assert text.startswith("FLA_DISABLE_BACKEND_DISPATCH is set: only fused_recurrent_gated_delta_rule is served")

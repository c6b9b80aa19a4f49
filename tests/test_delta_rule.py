"""chunk_gated_delta_rule_fwd against the token recurrence in fp64, and what never changes its bits."""

import math

import golden
import pytest
import torch
import torch.nn.functional as F
from compare import assert_all_bits, assert_bits, assert_close, flushed_denormals
from delta_rule_case import INPUTS, LAYOUTS, PACKED, case, cut, make, run, truth

import tidegate

ops = tidegate.ops


def assert_accurate(got, want, limit=1e-6):
    assert_close("o", got["o"], want[0], limit)
    assert_close("final state", got["final"], want[1], limit)


def test_packed_list(isa, dtype):
    p, want = case(tuple(PACKED), K=32, V=48, dtype=dtype, slowest=0.0005)
    got = run(p, "TND")
    assert got["o"].dtype == dtype and got["final"].dtype == torch.float32
    assert_accurate(got, want)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_every_length_to_130(isa, beta):
    p, want = case(tuple(range(131)), K=16, V=16, beta=beta, slowest=0.001)
    assert_accurate(run(p), want)


@pytest.mark.parametrize("K, V", [(16, 256), (60, 100), (64, 64), (100, 60), (128, 128), (256, 16), (256, 256)])
def test_head_sizes(isa, dtype, K, V):
    p, want = case((70, 3), G=1, K=K, V=V, dtype=dtype, initial=K != 64)
    assert_accurate(run(p, "BSND"), want)


@pytest.mark.parametrize("G", [1, 2, 3, 4])
def test_groups_and_layouts(isa, dtype, G):
    p, want = case((130, 1, 66), HK=2, G=G, K=20, V=36, dtype=dtype)
    results = run(p)
    assert_accurate(results, want)
    for layout in LAYOUTS:
        for out_layout in LAYOUTS:
            if (layout in ("TND", "NTD")) == (out_layout in ("TND", "NTD")):
                assert_all_bits(run(p, layout, out_layout), results)


def test_batch_has_the_bits_of_packed(isa):
    p, _ = case((70, 70), HK=2, K=20, V=36)
    want = run(p)
    rows = [p[name].unflatten(1, (2, 70)).transpose(0, 1).contiguous() for name in INPUTS]  # [B, H, T, ...]
    o, final, _ = ops.chunk_gated_delta_rule_fwd(*rows, p["h0"], output_final_state=True, layout="BNSD")
    assert_bits("o", o.transpose(0, 1).flatten(1, 2), want["o"])
    assert_bits("final state", final, want["final"])
    rows = [t.transpose(1, 2) for t in rows]
    o, final, _ = ops.chunk_gated_delta_rule_fwd(*rows, p["h0"], output_final_state=True)
    assert_bits("o", o.permute(2, 0, 1, 3).flatten(1, 2), want["o"])
    assert_bits("final state", final, want["final"])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_norms_and_gates_inside(isa, dtype, bias, scale):
    """q, k, a and b as the projections give them."""
    p = make([67, 130], HK=2, K=48, V=32, dtype=dtype)
    q, k = (torch.randn(2, 197, 48) * 3).to(dtype), (torch.randn(2, 197, 48) * 0.2).to(dtype)
    a, b = torch.randn(4, 197).to(dtype), torch.randn(4, 197).to(dtype)
    A_log, dt_bias = torch.empty(4).uniform_(0.01, 4).log(), torch.randn(4) - 2 if bias else None
    got = run(
        p | {"q": q, "k": k, "g": a, "beta": b},
        use_qk_l2norm=True,
        A_log=A_log,
        dt_bias=dt_bias,
        beta_sigmoid=True,
        beta_scale=scale,
        scale=0.3,
    )
    g, beta = golden.gdn_gating_fwd(
        a.double(), b.double(), A_log.double(), None if dt_bias is None else dt_bias.double(), scale
    )
    unit = [golden.l2norm_fwd(t.double())[0] for t in (q, k)]
    assert_accurate(got, truth(p | {"q": unit[0], "k": unit[1], "g": g, "beta": beta}, 0.3))


@pytest.mark.parametrize("value", [0.0, -20.0, -88.0, -104.0, -1e3, -1e38, -math.inf])
def test_gate_extremes(isa, value):
    p = make([3, 130, 200], slowest=0.02)
    where = torch.rand(p["g"].shape) < 0.1
    p["g"] = p["g"].masked_fill(where, value)
    assert_accurate(run(p), truth(p))


def test_nothing_before_a_reset_counts(isa):
    p = make([200], slowest=0.02)
    p["g"][:, [64, 101]] = -math.inf
    want = truth(cut(p, 0) | {name: p[name][:, 101:] for name in INPUTS} | {"cu": [0, 99]})
    p["v"][:, 30] = math.nan
    p["v"][:, 90] = math.inf
    got = run(p)
    assert_close("o", got["o"][:, 101:], want[0], 1e-6)
    assert_close("final state", got["final"], want[1], 1e-6)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_stays_causal(isa, dtype, name, bad):
    """It touches the tokens from its own on, of its sequence, and the heads that read it."""
    p = make([70, 150, 40], HK=2, K=20, V=36, dtype=dtype)
    want = run(p)
    t, head = 70 + 77, 1
    p[name] = p[name].clone()
    p[name][head, t] = bad
    got = run(p)
    heads = slice(2 * head, 2 * head + 2) if name in ("q", "k") else slice(head, head + 1)
    touched = torch.zeros(4, 260, dtype=torch.bool)
    touched[heads, t : t + 1 if name == "q" else 70 + 150] = True
    assert not got["o"][heads, t].isfinite().any()
    assert_bits("o", got["o"][~touched], want["o"][~touched])
    states = torch.zeros(3, 4, dtype=torch.bool)
    states[1, heads] = name != "q"  # q does not reach the state
    assert_bits("final state", got["final"][~states], want["final"][~states])


@pytest.mark.parametrize("layout", ["TND", "NTD"])
def test_packed_has_the_bits_of_separate_calls(isa, dtype, layout):
    p = make([65, 0, 1, 130, 64, 7], HK=2, K=40, V=24, dtype=dtype)
    want = run(p, layout)
    for n in range(6):
        got = run(cut(p, n), layout)
        assert_bits(f"o of {n}", got["o"], want["o"][:, p["cu"][n] : p["cu"][n + 1]])
        assert_bits(f"final state of {n}", got["final"], want["final"][n : n + 1])


def test_threads_and_batch_do_not_change_bits(isa):
    many = make([150] * 64, K=32, V=100, dtype=torch.bfloat16)
    alone = cut(many, 17)
    torch.set_num_threads(1)
    want = run(alone)
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        assert_all_bits(run(alone), want)
        got = run(many)
        assert_bits("o", got["o"][:, 17 * 150 : 18 * 150], want["o"])
        assert_bits("final state", got["final"][17:18], want["final"])


def test_strides_do_not_change_bits(isa):
    p = make([70, 5], HK=2, K=20, V=36)
    want = run(p)
    forms = {
        "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
        "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
        "slice": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
        "gaps between heads": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    }
    for form, to in forms.items():
        for result, value in run(p | {name: to(p[name]) for name in (*INPUTS, "h0")}).items():
            assert_bits(f"{form}: {result}", value, want[result])
    one = p | {name: p[name][:1, :1].expand_as(p[name]) for name in INPUTS}  # strides of 0
    assert_all_bits(run(one), run(one | {name: one[name].contiguous() for name in INPUTS}))


def test_fp64_is_the_definition():
    p = {k: t.double() if isinstance(t, torch.Tensor) else t for k, t in make([70, 0, 5], HK=2, K=5, V=3).items()}
    got = run(p)
    assert got["final"].dtype == torch.float64
    assert_accurate(got, truth(p), 1e-14)


def test_precision_bf16(isa):
    p, want = case((300, 20), K=64, V=64, dtype=torch.bfloat16)
    assert_accurate(run(p, precision="bf16"), want, 4e-3)


def test_flushed_denormals_do_not_matter(isa):
    p = make([140], K=16, V=16)
    p["v"] *= 1e-38
    p["h0"] *= 1e-38
    want = run(p)
    assert ((want["final"] != 0) & (want["final"].abs() < 1e-38)).any()
    with flushed_denormals():
        got = run(p)
    assert_all_bits(got, want)


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0]])
def test_no_tokens(lengths):
    p = make(lengths)
    got = run(p)
    assert got["o"].shape == (2, 0, 32)
    assert_bits("final state", got["final"], p["h0"])
    assert not run(p | {"h0": None})["final"].any()


def test_no_rows():
    inputs = [torch.ones(0, 5, 2, 3)] * 3 + [torch.ones(0, 5, 2)] * 2
    o, final, _ = ops.chunk_gated_delta_rule_fwd(*inputs, output_final_state=True)
    assert o.shape == (0, 5, 2, 3) and final.shape == (0, 2, 3, 3)
    pool = torch.ones(4, 2, 3, 3)
    none = torch.tensor([], dtype=torch.int64)
    assert ops.chunk_gated_delta_rule_pool(*inputs, pool, state_indices=none).shape == (0, 5, 2, 3)
    assert (pool == 1).all()


def test_unasked_outputs_are_empty():
    p, _ = case((70, 3), G=1, K=16, V=256, dtype=torch.float32)
    inputs = [p[name] for name in INPUTS]
    o, final, snapshots = ops.chunk_gated_delta_rule_fwd(*inputs, layout="NTD")
    assert o.shape == p["v"].shape and final.shape == snapshots.shape == (0,)


def test_compiled_function_follows_the_tokens():
    """One graph for any number of tokens, with torch's normalisation in front."""

    def call(q, k, v, g, beta, cu):
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return tidegate.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, cu_seqlens=cu)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (9, 64, 130):
            p = make([4, tokens - 4], K=8, V=8)
            inputs = [LAYOUTS["BSND"](p[name]) for name in INPUTS]
            cu = torch.tensor(p["cu"])
            for got, want in zip(compiled(*inputs, cu), call(*inputs, cu), strict=True):
                assert_bits("compiled", got, want)

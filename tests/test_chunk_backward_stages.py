"""The backward stages of the chunked delta rule: each against its golden function, all of them against autograd of the
token recurrence."""

import golden
import pytest
import torch
from chunk_case import (
    GRADIENTS,
    LENGTHS,
    SHORT,
    chain,
    chain_backward,
    make_backward,
    recurrence_backward,
    run,
    run_backward,
)
from compare import assert_all_bits, assert_bits, assert_close, error, flushed_denormals, leaves

import tidegate

STAGES = ("dv1", "dh", "dh0", "dv2", "dq", "dk1", "dw", "dg1", "dA", "dk2", "dv", "dbeta", "dg2")
SUMS = ("dh0", "dg1", "dg2", "dbeta")  # fp32 whatever the intermediate type is


def test_golden_chain_is_the_gradient_of_the_recurrence():
    for C in (16, 64):
        p = make_backward(beta_max=2.0)
        got, want = chain_backward(p, C), recurrence_backward(p)
        for name, value in want.items():
            assert error(got[name], value) < 1e-12, name


@pytest.mark.parametrize("C", [16, 32, 64, 128])
@pytest.mark.parametrize("K, V, G", [(16, 16, 1), (60, 100, 2), (64, 64, 3), (100, 60, 4), (128, 128, 1), (256, 16, 2)])
def test_each_stage_matches_golden(isa, dtype, C, K, V, G):
    """Every stage gets the same inputs as its golden function, so no error is inherited."""
    p = make_backward([C + 1, 0, 33], K=K, V=V, G=G, dtype=dtype)
    forward = {name: t.float() for name, t in chain(p, C).items()}
    given = {name: t.float() for name, t in chain_backward(p, C, forward=forward).items()}
    got = run_backward(p, C, given=given, forward=forward)
    want = chain_backward(p, C, given=given, forward=forward)
    plain = chain_backward(p, C, dtype=torch.float32, given=given, forward=forward)
    for name in STAGES:
        assert got[name].dtype == torch.float32, name
        assert_close(name, got[name], want[name], 1e-6, plain[name])


@pytest.mark.parametrize("inter", [torch.bfloat16, torch.float16])
def test_narrow_intermediates(isa, inter):
    """inter_dtype rounds what a stage stores, once; the state's gradient is carried in fp32."""
    p = make_backward(dtype=inter)
    forward = {name: t.float() if name == "gc" else t.to(inter) for name, t in chain(p).items()}
    given = chain_backward(p, forward=forward)
    given = {name: t.float() if name in SUMS else t.to(inter) for name, t in given.items()}
    got = run_backward(p, given=given, inter_dtype=inter, forward=forward)
    want = chain_backward(p, given=given, forward=forward)
    for name in STAGES:
        assert got[name].dtype == (torch.float32 if name in SUMS else inter), name
        assert_close(name, got[name], want[name], 1e-6)


def test_fused_is_da_and_full(isa, dtype):
    r = run_backward(make_backward(HK=2, dtype=dtype))
    assert_bits("dv", r["dv_both"], r["dv"])
    assert_bits("dbeta", r["dbeta_both"], r["dbeta"])
    assert_bits("dg", r["dg_both"], r["dg2"])
    assert_bits("dk", r["dk"], r["dk1"] + r["dk2"])


def assert_gradients(p, got, want, limit=1e-6):
    for name in GRADIENTS:
        assert_close(name, got[name], want[name], limit)


def test_packed_lengths_give_the_gradients_of_the_recurrence(isa, dtype):
    p = make_backward(LENGTHS, K=16, V=16, dtype=dtype)
    want = recurrence_backward(p)
    for layout in ("TND", "NTD"):
        assert_gradients(p, run_backward(p, layout=layout), want)


@pytest.mark.parametrize("G", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["BSND", "TND", "BNSD", "NTD"])
def test_every_group_and_layout(isa, dtype, G, layout):
    p = make_backward(HK=2, G=G, dtype=dtype, beta_max=2.0)
    got = run_backward(p, layout=layout, v_first=G % 2 == 0)
    assert_gradients(p, got, recurrence_backward(p))
    assert_all_bits(got, run_backward(p))


def test_batch_rows_are_sequences(isa):
    """Three rows of 70 tokens have the bits of three packed sequences, dh included."""
    p = make_backward([70, 70, 70], HK=2)
    f = run(p)
    want = run_backward(p, forward=f)
    rows = lambda t: t.unflatten(1, (3, t.shape[1] // 3)).transpose(0, 1).contiguous()  # noqa: E731
    q, k, v, beta, do = (rows(p[name]) for name in ("q", "k", "v", "beta", "do"))
    f, at, ops = {name: rows(t) for name, t in f.items() if name != "ht"}, {"layout": "BNSD"}, tidegate.ops
    scaled = {**at, "scale": 0.25}
    r = {"dv1": ops.chunk_bwd_dv_local(q, k, do, f["gc"], **scaled)}
    r["dh"], dh0, r["dv2"] = ops.chunk_gated_delta_rule_bwd_dhu(q, k, f["w"], do, r["dv1"], f["gc"], p["dht"], **scaled)
    r["dq"], r["dk1"], r["dw"], r["dg1"] = ops.chunk_bwd_dqkwg(
        q, k, f["v_new"], f["gc"], f["h"], do, r["dh"], r["dv2"], **scaled
    )
    wy = [k, v, beta, f["A"], r["dw"], r["dv2"], f["gc"]]
    r["dA"] = ops.prepare_wy_repr_bwd_da(*wy, **at)
    r["dk2"], r["dv"], r["dbeta"], r["dg2"] = ops.prepare_wy_repr_bwd(*wy, **at)
    for name, value in r.items():
        assert_bits(name, value, rows(want[name]))
    assert_bits("dh0", dh0, want["dh0"])


@pytest.mark.parametrize("layout", ["TND", "NTD"])
def test_packed_equals_separate(isa, dtype, layout):
    p = make_backward(HK=2, dtype=dtype)
    packed, cu = run_backward(p, layout=layout), golden.cu_from_lengths(SHORT)
    chunks = [n for n, _, _ in golden.chunk_list(cu, 64)]
    for n, length in enumerate(SHORT):
        states = {name: p[name][n : n + 1] for name in ("h0", "dht")}
        part = {name: t[:, cu[n] : cu[n + 1]] for name, t in p.items() if name not in ("h0", "dht", "lengths")}
        alone = run_backward(part | states | {"lengths": [length]}, layout=layout)
        for name, value in alone.items():
            whole = packed[name]
            if name == "dh0":
                whole = whole[n : n + 1]
            elif name == "dh":
                whole = whole[:, [i for i, owner in enumerate(chunks) if owner == n]]
            else:
                whole = whole[:, cu[n] : cu[n + 1]]
            assert_bits(f"{name} of sequence {n}", value.contiguous(), whole.contiguous())


def test_threads_do_not_change_bits(isa):
    p = make_backward(HK=3, V=130, dtype=torch.bfloat16)
    torch.set_num_threads(1)
    want = run_backward(p)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert_all_bits(run_backward(p), want)


def test_flushed_denormals_do_not_matter(isa):
    p = make_backward()
    for name in ("do", "dht"):
        p[name] *= 1e-38
    want = run_backward(p)
    assert ((want["dq"] != 0) & (want["dq"].abs() < 1e-39)).any()
    with flushed_denormals():
        got = run_backward(p)
    for name in STAGES:  # the other results are sums that torch made
        assert_bits(name, got[name], want[name])


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "do", "h0", "dht"])
def test_a_sequence_does_not_change_the_gradients_of_others(isa, name):
    """NaN in one token or state: other sequences and the other group of heads keep their bits."""
    p = make_backward(HK=2, G=2)
    cu, want = golden.cu_from_lengths(SHORT), run_backward(p)
    state = name in ("h0", "dht")
    for t in (cu[4], cu[4] + 70, cu[5] - 1):
        bad = {**p, name: p[name].clone()}
        bad[name][(4, 0) if state else (0, t)] = float("nan")
        got = run_backward(bad)
        others = [n for n in range(len(SHORT)) if n != 4]
        for result in ("dq", "dk", "dv", "dw", "dg", "dbeta", "dv1", "dv2"):
            heads = want[result].shape[0] // 2  # the first key head and its value heads
            keep = torch.ones(want[result].shape[:2], dtype=torch.bool)
            keep[:heads, cu[4] : cu[5]] = False
            assert_bits(f"{result} at {t}", got[result][keep], want[result][keep])
        assert_bits("dh0", got["dh0"][others], want["dh0"][others])
        assert_bits("dh0 of other heads", got["dh0"][:, 2:].contiguous(), want["dh0"][:, 2:].contiguous())


def test_extreme_gates(isa):
    """Decay from none to total at random tokens: the gradients of the recurrence up to the rounding of gc to fp32."""
    for value in (0.0, -20.0, -88.0, -104.0, -1e3, -1e38, float("-inf")):
        p = make_backward([3, 67, 65])
        p["g"] = torch.where(torch.rand_like(p["g"]) < 0.2, value, -0.05 * torch.rand_like(p["g"]))
        f = run(p)
        rounding = f["gc"].abs().max().item() * 2.0**-24
        assert_gradients(p, run_backward(p, forward=f), recurrence_backward(p), 1e-6 + rounding)


def test_any_strides():
    p = make_backward(HK=2)
    want = run_backward(p)
    for change in (lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]], lambda t: t.repeat_interleave(2, -1)[..., ::2]):
        got = run_backward({name: t if name == "lengths" else change(t) for name, t in p.items()})
        assert_all_bits(got, want)


def test_fp64_is_the_golden_chain():
    p = {name: t if name == "lengths" else t.double() for name, t in make_backward().items()}
    got, want = run_backward(p, 32), chain_backward(p, 32)
    for name, value in want.items():
        assert got[name].dtype == torch.float64
        assert error(got[name], value) < 1e-12, name


def test_missing_gradient_of_the_final_state_is_zero(isa):
    p = make_backward()
    p["dht"] = torch.zeros_like(p["dht"])
    f, cu = run(p), torch.tensor(golden.cu_from_lengths(SHORT))
    want = run_backward(p, forward=f)
    dh, dh0, dv2 = tidegate.ops.chunk_gated_delta_rule_bwd_dhu(
        p["q"], p["k"], f["w"], p["do"], want["dv1"], f["gc"], cu_seqlens=cu, scale=0.25, layout="NTD"
    )
    for name, value in (("dh", dh), ("dh0", dh0), ("dv2", dv2)):
        assert_bits(name, value, want[name])


def test_stages_refuse_a_gradient():
    p = make_backward([20])
    f = run(p)
    for name, source in (("dv1", "do"), ("dh", "dht"), ("dq", "q"), ("dA", "v"), ("dk2", "beta")):
        (leaf,) = leaves(p[source])
        result = run_backward({**p, source: leaf}, forward=f)[name]
        with pytest.raises(RuntimeError, match="a gradient of a single stage is not supported"):
            result.sum().backward()
    (leaf,) = leaves(p["k"])
    wy = [leaf, p["v"], p["beta"], f["A"], f["w"], f["u"], f["gc"]]
    with pytest.raises(RuntimeError, match="prepare_wy_repr_bwd: a gradient of a gradient"):
        tidegate.ops.prepare_wy_repr_bwd(*wy, layout="NTD")[0].sum().backward()


def test_number_of_chunks_may_be_unknown_to_the_compiler():
    """Without num_chunks the size of dh depends on the values in cu_seqlens."""
    p = make_backward([20, 3])
    f = run(p, 16)
    args = [p["q"], p["k"], f["w"], p["do"], f["u"], f["gc"], None, torch.tensor([0, 20, 23])]
    torch.library.opcheck(
        torch.ops.tidegate.chunk_gated_delta_rule_bwd_dhu.default, args, {"chunk_size": 16, "layout": "NTD"}
    )


def test_empty():
    p = make_backward([0, 0], HK=2)
    got = run_backward(p)
    assert got["dh"].shape == (4, 0, 24, 20) and got["dq"].shape == (2, 0, 24)
    assert_bits("dh0", got["dh0"], p["dht"])

"""The six stages of the chunked delta rule: each against its golden function, all of them against the recurrence."""

import golden
import pytest
import torch
from chunk_case import FLOOR, LENGTHS, SHORT, chain, make, recurrence, run
from compare import assert_all_bits, assert_bits, assert_close, error, flushed_denormals, leaves

import tidegate


def test_golden_chain_is_the_recurrence():
    for C in (16, 64):
        p = make(beta_max=2.0)
        got, want = chain(p, C), recurrence(p)
        for name, value in want.items():
            assert error(got[name], value) < 1e-13, name


@pytest.mark.parametrize("C", [16, 32, 64, 128])
@pytest.mark.parametrize("K, V, G", [(16, 16, 1), (60, 100, 2), (64, 64, 3), (100, 60, 4), (128, 128, 1), (256, 16, 2)])
def test_each_stage_matches_golden(isa, dtype, C, K, V, G):
    """Every stage gets the same inputs as its golden function, so no error is inherited."""
    p = make([C + 1, 0, 33], K=K, V=V, G=G, dtype=dtype)
    given = {name: t.float() for name, t in chain(p, C).items()}
    got = run(p, C, given=given)
    want, plain = chain(p, C, given=given), chain(p, C, dtype=torch.float32, given=given)
    for name, value in got.items():
        if name == "gc":
            assert ((value - want[name]).abs() <= 1e-7 * want[name].abs().clamp(min=1)).all()
            continue
        assert value.dtype == (dtype if name == "o" else torch.float32), name
        assert_close(name, value, want[name], 1e-6, plain[name])


@pytest.mark.parametrize("inter", [torch.bfloat16, torch.float16])
def test_narrow_intermediates(isa, inter):
    """inter_dtype rounds what a stage stores, once; the state is carried in fp32."""
    p = make(dtype=inter)
    given = {name: t.to(inter).float() if name != "gc" else t.float() for name, t in chain(p).items()}
    given = {name: t if name == "gc" else t.to(inter) for name, t in given.items()}
    got, want = run(p, given=given, inter_dtype=inter), chain(p, given=given)
    for name in ("A0", "A", "w", "u", "h", "v_new"):
        assert got[name].dtype == inter
        assert_close(name, got[name], want[name], 1e-6)
    assert got["ht"].dtype == torch.float32
    assert_close("ht", got["ht"], want["ht"], 1e-6)


def test_chain_of_packed_lengths_is_the_recurrence(isa, dtype):
    p = make(LENGTHS, K=16, V=16, dtype=dtype)
    want = recurrence(p)
    for layout in ("TND", "NTD"):
        got = run(p, layout=layout)
        assert_close("o", got["o"], want["o"], 1e-6)
        assert_close("ht", got["ht"], want["ht"], 1e-6)


@pytest.mark.parametrize("G", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["BSND", "TND", "BNSD", "NTD"])
def test_chain_of_every_group_and_layout(isa, dtype, G, layout):
    p = make(HK=2, G=G, dtype=dtype, beta_max=2.0)
    want, got = recurrence(p), run(p, layout=layout, v_first=G % 2 == 0)
    assert_close("o", got["o"], want["o"], 1e-6)
    assert_close("ht", got["ht"], want["ht"], 1e-6)


def test_batch_rows_are_sequences(isa):
    """Three rows of 70 tokens have the bits of three packed sequences, h included."""
    p = make([70, 70, 70], HK=2)
    want = run(p)
    rows = lambda t: t.unflatten(1, (3, 70)).transpose(0, 1).contiguous()  # noqa: E731
    ops, at = tidegate.ops, {"layout": "BNSD"}
    q, k, v, g, beta = (rows(p[name]) for name in ("q", "k", "v", "g", "beta"))
    gc = ops.chunk_local_cumsum(g, 64, **at, floor=FLOOR)
    A = ops.solve_tril(ops.chunk_scaled_dot_kkt(k, gc, beta, **at), **at)
    w, u = ops.recompute_w_u(k, v, beta, A, gc, **at)
    h, v_new, ht = ops.chunk_gated_delta_rule_fwd_h(k, w, u, gc, p["h0"], **at, output_final_state=True)
    o = ops.chunk_fwd_o(q, k, v_new, h, gc, **at, scale=0.25)
    assert h.shape == (3, 4, 2, 24, 20)
    for name, t in (("A", A), ("w", w), ("v_new", v_new), ("o", o)):
        assert_bits(name, t, rows(want[name]))
    assert_bits("h", h.transpose(0, 1).flatten(1, 2).contiguous(), want["h"])
    assert_bits("ht", ht, want["ht"])


@pytest.mark.parametrize("layout", ["TND", "NTD"])
def test_packed_equals_separate(isa, dtype, layout):
    p = make(HK=2, dtype=dtype)
    packed, cu = run(p, layout=layout), golden.cu_from_lengths(SHORT)
    chunks = [n for n, _, _ in golden.chunk_list(cu, 64)]
    for n, length in enumerate(SHORT):
        part = {name: t[:, cu[n] : cu[n + 1]] for name, t in p.items() if name not in ("h0", "lengths")}
        alone = run(part | {"h0": p["h0"][n : n + 1], "lengths": [length]}, layout=layout)
        for name, value in alone.items():
            whole = packed[name]
            if name == "ht":
                whole = whole[n : n + 1]
            elif name == "h":
                whole = whole[:, [i for i, owner in enumerate(chunks) if owner == n]]
            else:
                whole = whole[:, cu[n] : cu[n + 1]]
            assert_bits(f"{name} of sequence {n}", value.contiguous(), whole.contiguous())


def test_threads_do_not_change_bits(isa):
    p = make(HK=3, V=130, dtype=torch.bfloat16)
    torch.set_num_threads(1)
    want = run(p)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert_all_bits(run(p), want)


def test_flushed_denormals_do_not_matter(isa):
    p = make()
    p["v"] *= 1e-38
    p["h0"] *= 1e-38
    want = run(p)
    assert ((want["o"] != 0) & (want["o"].abs() < 1e-39)).any()
    with flushed_denormals():
        got = run(p)
    assert_all_bits(got, want)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_nan_stays_causal(isa, name):
    """A NaN of token t: earlier tokens, other sequences and the other group of heads keep their bits."""
    p = make(HK=2, G=2)
    cu = golden.cu_from_lengths(SHORT)
    want = run(p)
    for t in (cu[4], cu[4] + 70, cu[5] - 1):
        bad = {**p, name: p[name].clone()}
        bad[name][0, t] = float("nan")
        got = run(bad)
        heads = 2 if p[name].shape[0] == 2 else 1
        assert got["o"][0, t].isnan().all()
        for result in ("gc", "A0", "A", "w", "u", "v_new", "o"):
            keep = torch.ones(4, cu[-1], dtype=torch.bool)
            keep[:heads, t : cu[5]] = False
            assert_bits(f"{result} at {t}", got[result][keep], want[result][keep])
        others = [n for n in range(len(SHORT)) if n != 4]
        assert_bits("ht", got["ht"][others], want["ht"][others])
        assert_bits("ht of the other heads", got["ht"][:, heads:].contiguous(), want["ht"][:, heads:].contiguous())


def test_extreme_gates(isa):
    """Decay from none to total at random tokens: exact for the gc that the stages were given, and the recurrence up to
    the rounding of that gc to fp32."""
    for value in (0.0, -20.0, -88.0, -104.0, -1e3, -1e38, float("-inf")):
        p = make([3, 67, 65])
        p["g"] = torch.where(torch.rand_like(p["g"]) < 0.2, value, -0.05 * torch.rand_like(p["g"]))
        got, want = run(p), recurrence(p)
        same_gc = chain(p, gc=got["gc"])
        rounding = got["gc"].abs().max().item() * 2.0**-24
        for name in ("o", "ht"):
            assert_close(f"{name} at {value}", got[name], same_gc[name], 1e-6)
            assert_close(f"{name} at {value}", got[name], want[name], 1e-6 + rounding)


def test_without_gates(isa):
    p = make()
    cu, zero = torch.tensor(golden.cu_from_lengths(SHORT)), torch.zeros_like(p["g"])
    got = tidegate.ops.chunk_scaled_dot_kkt(p["k"], None, p["beta"], cu_seqlens=cu, layout="NTD")
    assert_bits("A0", got, tidegate.ops.chunk_scaled_dot_kkt(p["k"], zero, p["beta"], cu_seqlens=cu, layout="NTD"))
    assert_close(
        "A0",
        got,
        golden.chunk_scaled_dot_kkt(
            *(p[n].double() for n in ("k",)), zero.double(), p["beta"].double(), cu.tolist(), 64
        ),
        1e-6,
    )


def test_any_strides():
    p = make(HK=2)
    want = run(p)
    wider = lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]]  # noqa: E731
    got = run({name: t if name == "lengths" else wider(t) for name, t in p.items()})
    assert_all_bits(got, want)
    inner = lambda t: t.repeat_interleave(2, -1)[..., ::2]  # noqa: E731
    got = run({name: t if name == "lengths" else inner(t) for name, t in p.items()})
    assert_all_bits(got, want)


def test_fp64_is_the_golden_chain():
    p = {name: t if name == "lengths" else t.double() for name, t in make().items()}
    got, want = run(p, 32), chain(p, 32)
    for name, value in want.items():
        assert got[name].dtype == torch.float64
        assert error(got[name], value) < 1e-13, name


@pytest.mark.parametrize("reverse", [False, True])
def test_cumsum_matches_golden(isa, reverse):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for C in (1, 2, 64, 512):
            g = (-torch.rand(11, 700) * 300).to(dtype)
            cu = [0, 0, 600, 601, 700]
            options = {
                "reverse": reverse,
                "floor": FLOOR,
                "scale": 1.5,
                "layout": "NTD",
                "cu_seqlens": torch.tensor(cu),
            }
            want = 1.5 * golden.chunk_local_cumsum(g.double(), cu, C, reverse, FLOOR)
            for out_dtype, limit in ((torch.float32, 1e-7), (torch.float64, 1e-15)):
                got = tidegate.ops.chunk_local_cumsum(g, C, **options, out_dtype=out_dtype)
                assert got.dtype == out_dtype
                assert ((got - want).abs() <= limit * want.abs().clamp(min=1)).all()


@pytest.mark.parametrize("floor", [None, -0.5])
def test_cumsum_gradient(floor):
    options = {"cu_seqlens": torch.tensor([0, 9, 9, 14]), "scale": 0.7, "layout": "TND", "floor": floor}
    (g,) = leaves(-torch.rand(14, 3).double())
    for reverse in (False, True):
        call = lambda x: tidegate.ops.chunk_local_cumsum(x, 4, reverse=reverse, **options)  # noqa: B023, E731
        assert torch.autograd.gradcheck(call, [g], nondet_tol=0.0)
        assert torch.autograd.gradgradcheck(call, [g], nondet_tol=0.0)
    (half,) = leaves(g.bfloat16())
    tidegate.ops.chunk_local_cumsum(half, 4, **options).sum().backward()
    assert half.grad.dtype == torch.bfloat16 and half.grad.any()


def test_other_stages_refuse_a_gradient():
    p = make([20])
    for name, source in (("A0", "k"), ("w", "v"), ("h", "h0"), ("o", "q")):
        (leaf,) = leaves(p[source])
        result = run({**p, source: leaf})[name]
        with pytest.raises(RuntimeError, match="a gradient of a single stage is not supported"):
            result.sum().backward()


def test_number_of_chunks_may_be_unknown_to_the_compiler():
    """Without num_chunks the size of h depends on the values in cu_seqlens."""
    p = make([20, 3])
    r = run(p, 16)
    args = [p["k"], r["w"], r["u"], r["gc"], None, torch.tensor([0, 20, 23])]
    torch.library.opcheck(
        torch.ops.tidegate.chunk_gated_delta_rule_fwd_h.default, args, {"chunk_size": 16, "layout": "NTD"}
    )


def test_empty():
    p = make([0, 0], HK=2)
    got = run(p)
    assert got["h"].shape == (4, 0, 24, 20) and got["o"].shape == (4, 0, 20)
    assert_bits("ht", got["ht"], p["h0"])

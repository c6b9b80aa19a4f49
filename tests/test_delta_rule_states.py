"""States of the gated delta rule: both orders, snapshots, pools in place, and the map of a segment."""

import pytest
import torch
from compare import assert_all_bits, assert_bits, assert_close, error
from delta_rule_case import INPUTS, case, cut, make, run, truth
from golden import segment_map

import tidegate

ops = tidegate.ops
POINTS = [(2, 131), (0, 64), (0, 0), (0, 128), (0, 101), (0, 99), (0, 200), (1, 2), (2, 1), (0, 32), (0, 101)]


def test_state_v_first(isa):
    p, _ = case((70, 0, 5), K=20, V=36)
    points = torch.tensor([[0, 64], [2, 3]])
    want = run(p, snapshot_at=points)
    got = run(p | {"h0": p["h0"].mT.contiguous()}, snapshot_at=points, state_v_first=True)
    assert got["final"].shape == (3, 2, 36, 20)
    assert_all_bits(got | {name: got[name].mT for name in ("final", "snapshots")}, want)
    assert_all_bits(run(p | {"h0": p["h0"].mT.contiguous().mT}, snapshot_at=points), want)


def test_state_types(isa):
    """Initial states of any type are widened; a final state of 16 bits is rounded once, at the end."""
    p, _ = case((70, 0, 5), K=20, V=36)
    for kind in (torch.bfloat16, torch.float16):
        narrow = p | {"h0": p["h0"].to(kind)}
        assert_all_bits(run(narrow), run(p | {"h0": narrow["h0"].float()}))
    want, cu = run(p), torch.tensor(p["cu"])
    o, final = torch.empty_like(p["v"]), torch.empty(3, 2, 20, 36, dtype=torch.bfloat16)
    inputs = [p[name] for name in INPUTS]
    ops.chunk_gated_delta_rule_fwd.out(*inputs, p["h0"], cu_seqlens=cu, layout="NTD", o=o, final_state=final)
    assert_bits("o", o, want["o"])
    assert_bits("final state", final, want["final"].bfloat16())


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_snapshots(isa, dtype, kind):
    """On and off the chunk grid: the bits of the final state of a run that ends there."""
    p = make([200, 3, 131], K=20, V=40, dtype=dtype, slowest=0.001)
    p["g"][:, 100] = -300.0
    want = run(p)
    got = run(p, snapshot_at=torch.tensor(POINTS, dtype=kind))
    assert got["snapshots"].dtype == torch.float32
    assert_all_bits({k: got[k] for k in ("o", "final")}, {k: want[k] for k in ("o", "final")})
    for m, (n, tokens) in enumerate(POINTS):
        part = cut(p, n, tokens)
        assert_bits(f"snapshot {n}, {tokens}", got["snapshots"][m : m + 1], run(part)["final"])
        assert_close(f"snapshot {n}, {tokens}", got["snapshots"][m : m + 1], truth(part)[1], 1e-6)
    assert run(p, snapshot_at=torch.zeros(0, 2, dtype=kind))["snapshots"].shape == (0, 2, 20, 40)


def test_chunk_size(isa):
    assert tidegate.chunk_size() in (16, 32, 64, 128)  # prefix caches want a power of two


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_pool(isa, dtype, kind):
    """Slots of a pool with gaps in memory: read, written in place, and no other slot touched."""
    p = make([70, 9, 0, 40], K=20, V=16, dtype=dtype)
    memory = torch.randn(6, 3, 20, 18).to(kind)
    memory[2, :2, :, :16] = float("nan")  # a slot that starts from 0 is not read
    pool, before = memory[:, :2, :, :16], memory.clone()
    slots, fresh = [4, -1, 0, 2], 3
    p["h0"] = pool[[4, 1, 0, 2]].float()
    p["h0"][fresh] = 0
    want = run(p)
    o = ops.chunk_gated_delta_rule_pool(
        *[p[name] for name in INPUTS],
        pool,
        state_indices=torch.tensor(slots, dtype=torch.int32),
        cu_seqlens=torch.tensor(p["cu"]),
        has_initial_state=torch.tensor([True, True, True, False]),
        layout="NTD",
    )
    before[[4, 0, 2], :2, :, :16] = want["final"][[0, 2, 3]].to(kind)
    assert_bits("pool and the memory around it", memory, before)
    want["o"][:, 70:79] = 0
    assert_bits("o", o, want["o"])


def test_pool_in_steps(isa):
    """A prompt in two calls leaves what one call leaves."""
    p = make([128, 192], K=20, V=16)
    want = run(p)
    pool = torch.zeros(3, 2, 20, 16)
    pool[[2, 0]] = p["h0"]
    outputs = []
    for first, last in ((0, 64), (64, None)):
        parts = [{name: t[:, first:last] for name, t in cut(p, n).items() if name in INPUTS} for n in (0, 1)]
        lengths = [part["v"].shape[1] for part in parts]
        o = ops.chunk_gated_delta_rule_pool(
            *[torch.cat([part[name] for part in parts], 1) for name in INPUTS],
            pool,
            state_indices=torch.tensor([2, 0]),
            cu_seqlens=torch.tensor([0, lengths[0], sum(lengths)]),
            layout="NTD",
        )
        outputs.append(o.split(lengths, 1))
    assert_bits("o", torch.cat([outputs[0][0], outputs[1][0], outputs[0][1], outputs[1][1]], 1), want["o"])
    assert_bits("states", pool[[2, 0]], want["final"])


# --- the map of a segment --------------------------------------------------------------------------------------------


def maps(p, first=0, last=None, **options):
    parts = [p[name][:, first:last] for name in ("k", "v", "g", "beta")]
    return ops.gdn_segment_map(*parts, layout="NTD", **options)


def test_segment_map(isa, dtype):
    p, _ = case((130,), HK=2, K=20, V=36, dtype=dtype, slowest=0.001)
    phi, s = maps(p)
    want = segment_map(*(p[name].double() for name in ("k", "v", "g", "beta")))
    assert phi.dtype == s.dtype == torch.float32
    assert_close("phi", phi[0], want[0], 1e-6)
    assert_close("s", s[0], want[1], 1e-6)


def test_segment_map_of_packed_sequences(isa):
    """Every sequence has the bits of a call of its own; an empty one is the identity."""
    p, _ = case((65, 0, 130, 1), HK=2, K=20, V=36)
    phi, s = maps(p, cu_seqlens=torch.tensor(p["cu"]))
    for n in range(4):
        alone = maps(cut(p, n))
        assert_bits("phi", phi[n], alone[0][0])
        assert_bits("s", s[n], alone[1][0])
    assert_bits("identity", phi[1], torch.eye(20).repeat(4, 1, 1))
    assert not s[1].any()


def test_segment_map_forgets_at_a_reset(isa):
    p = make([130], K=20, V=36)
    p["g"][:, 77] = float("-inf")
    phi, s = maps(p)
    assert not phi.any() and s.all()


@pytest.mark.parametrize("at", [(1, 2), (64, 128), (63, 190), (100, 100), (0, 299)])
def test_split_sequence_is_one_run(isa, dtype, at):
    """Three segments: combined they are the map of the whole, and it carries the state across."""
    p, (_, want) = case((300,), HK=2, K=20, V=36, dtype=dtype, slowest=0.001)
    first, second, third = maps(p, 0, at[0]), maps(p, at[0], at[1]), maps(p, at[1])
    left = ops.gdn_segment_combine(*ops.gdn_segment_combine(*first, *second), *third)
    right = ops.gdn_segment_combine(*first, *ops.gdn_segment_combine(*second, *third))
    inputs = [p[name].float() for name in ("k", "v", "g", "beta")]
    whole = segment_map(*(t.double() for t in inputs))
    # phi shrinks with every token, its rounding errors less so: plain fp32 is at 1.4e-6 of it after these.
    limit = max(1e-6, error(segment_map(*inputs)[0], whole[0]))
    for phi, s in (left, right):
        assert_close("phi", phi[0], whole[0], limit)
        assert_close("s", s[0], whole[1], 1e-6)
        assert_close("final state", phi @ p["h0"] + s, want, 1e-6)


def test_segment_map_forms_gates_inside(isa, dtype):
    p = make([100], HK=2, K=20, V=36, dtype=dtype)
    options = {"use_qk_l2norm": True, "beta_sigmoid": True, "beta_scale": 2.0, "A_log": torch.rand(4) - 3}
    raw = p | {"k": p["k"] * 3, "g": torch.randn(4, 100), "beta": torch.randn(4, 100).to(dtype)}
    phi, s = maps(raw, dt_bias=torch.ones(4), **options)
    final = run(raw | {"q": raw["k"]}, dt_bias=torch.ones(4), **options)["final"]
    assert_close("final state", phi @ p["h0"] + s, final, 1e-6)


def test_combine_copies_what_is_not_dense():
    p, _ = case((130,), HK=2, K=20, V=36)
    parts = (*maps(p, 0, 50), *maps(p, 50))
    want = ops.gdn_segment_combine(*parts)
    got = ops.gdn_segment_combine(*(t.mT.contiguous().mT for t in parts))
    for name, x, y in zip(("phi", "s"), got, want, strict=True):
        assert_bits(name, x, y)


@pytest.mark.parametrize("segments", [2, 5])
def test_time_segments(isa, dtype, segments):
    """A sequence cut in time inside the call: other bits, the same answer."""
    p = make([300, 0, 64, 7], K=20, V=24, dtype=dtype)
    o, final = truth(p)
    got = run(p, time_segments=segments)
    assert_close("o", got["o"], o, 1e-6)
    assert_close("final", got["final"], final, 1e-6)

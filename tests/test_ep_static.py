"""Expert parallelism with rows of a fixed number, whatever the routing is: the same results and gradients."""

import pytest
import torch
from ep_ranks import run_ranks

import tidegate
from tidegate.errors import ExpertParallelError

pytestmark = pytest.mark.skipif(tidegate.isa() == "fallback", reason="needs the native library")
K, H, WIDTH, COUNTS = 3, 24, 8, [5, 0, 4]


def buffer_of(kind, rank, experts):
    sizes = dict(experts=experts, slots=K, row_bytes=4 * H, max_tokens=max(COUNTS), timeout=20.0)
    if kind == "one node":
        return tidegate.ep.Buffer(**sizes)
    return tidegate.ep.NodesBuffer(node="ab"[rank % 2], combine=kind, **sizes)


def make(experts, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    random = lambda *sizes: torch.randn(*sizes, generator=generator).to(dtype)  # noqa: E731
    total = sum(COUNTS)
    ids = torch.rand(total, experts, generator=generator).argsort(1)[:, :K]  # no expert twice in a token
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -1)
    floats = [random(total, H), random(total, K), random(experts, 2 * WIDTH, H) / 4, random(experts, H, WIDTH) / 3]
    return ids, floats, random(total, H)


def parts(buffer, ids, given, dout, static_shape):
    """Out and all gradients; rows behind those that came are given NaN as their result."""
    rows, handle = tidegate.ep.dispatch(buffer, given[0], ids, given[1], static_shape=static_shape)
    assert rows.shape == (handle.shape_rows, H) and int(handle.expert_rows.sum()) == handle.rows
    assert not rows[handle.rows :].any()
    assert (handle.row_expert[handle.rows :] == -1).all() and (handle.row_rank[handle.rows :] == -1).all()
    ones = torch.ones_like(handle.row_weights)
    y = tidegate.moe_experts(rows, handle.row_expert, ones, given[2], given[3], round_y=True)
    assert not y[handle.rows :].any()
    behind = torch.full((handle.shape_rows - handle.rows, H), torch.nan, dtype=y.dtype)
    out = tidegate.ep.combine(buffer, torch.cat([y[: handle.rows], behind]), handle, rows=rows)
    out.backward(dout)
    return handle, [out.detach(), *[t.grad for t in given]]


def layer(rank, ranks, kind, experts, dtype):
    buffer = buffer_of(kind, rank, experts)
    own = slice(sum(COUNTS[:rank]), sum(COUNTS[: rank + 1]))
    mine = slice(buffer.expert_begin[rank], buffer.expert_begin[rank + 1])
    came = set()
    for seed in range(3):
        ids, (x, weights, gate_up, down), dout = make(experts, dtype, seed)
        found = []
        for static_shape in (False, True):
            given = [t.clone().requires_grad_() for t in (x[own], weights[own], gate_up[mine], down[mine])]
            handle, results = parts(buffer, ids[own], given, dout[own], static_shape)
            found.append(results)
            expected = sum(COUNTS) * min(K, buffer.local_experts) if static_shape else handle.rows
            assert handle.shape_rows == expected
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        came.add(handle.rows)
        # Without gradients, and as int8.
        rows, same = tidegate.ep.dispatch(buffer, x[own], ids[own], static_shape=True)
        assert rows.shape == (expected, H) and same.rows == handle.rows
        again = buffer.redispatch(x[own], same)
        assert torch.equal(again, rows)
        for smooth_scale in (None, torch.ones(experts, H)):
            quantised = buffer.dispatch(x[own], ids[own], int8=True, smooth_scale=smooth_scale, static_shape=True)
            q, scales = buffer.expand(quantised)
            assert q.shape == rows.shape and scales.shape == rows.shape[:1]
            assert not q[handle.rows :].any() and not scales[handle.rows :].any()
            wanted = tidegate.quantize(rows[: handle.rows])
            assert torch.equal(q[: handle.rows], wanted[0]) and torch.equal(scales[: handle.rows], wanted[1])
    assert len(came) > 1 or buffer.local_experts == 0


@pytest.mark.parametrize("kind", ["one node", "exact", "fast"])
def test_results_are_those_without(kind, tmp_path):
    for experts, dtype in ((4, torch.float32), (12, torch.bfloat16)):  # fewer than slots on a rank, and more
        run_ranks(3, tmp_path / f"ranks{experts}", layer, kind, experts, dtype)


def errors(rank, ranks, kind):
    x, ids = torch.zeros(2, H), torch.tensor([[0, 1, 2], [3, -1, 1]])
    twice = torch.tensor([[0, 1, 2], [3, 2, 2]])  # the last rank has two of four experts
    buffer = buffer_of(kind, rank, 4)
    text = r"ep_dispatch: ids: expected at most 2 experts of rank 2 in a token \(static_shape\), got 3 in token 1"
    error, before = (ValueError, "^") if rank == 1 else (ExpertParallelError, "rank 1 failed: ")
    with pytest.raises(error, match=before + text):
        buffer.dispatch(x, twice if rank == 1 else ids, static_shape=True)
    torch.distributed.barrier()
    if kind == "one node":
        buffer.reset()
    assert buffer.dispatch(x, twice).rows == [3, 3, 12][rank]  # legal without
    masked = torch.tensor([[True, True, True], [True, True, False]])
    assert buffer.dispatch(x, twice, mask=masked, static_shape=True).rows == [3, 3, 9][rank]
    with pytest.raises(ExpertParallelError, match="disagree: static_shape is [01] on rank "):
        buffer.dispatch(x, ids, static_shape=rank == 1)


@pytest.mark.parametrize("kind", ["one node", "exact"])
def test_errors(kind, tmp_path):
    run_ranks(3, tmp_path / "ranks", errors, kind)

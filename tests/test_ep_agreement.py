"""Ranks that make different buffers, or fail between exchanges: an error on all of them, at once."""

import time
from contextlib import contextmanager

import pytest
import torch
from ep_ranks import run_ranks

import tidegate
from tidegate.errors import ExpertParallelError

pytestmark = pytest.mark.skipif(tidegate.isa() == "fallback", reason="needs the native library")
E, K, H, WIDTH = 6, 2, 8, 4
SIZES = dict(experts=E, slots=K, row_bytes=8 * H, max_tokens=4)


def make(experts, dtype=torch.float32):
    """ids, x, weights, gate_up and down; those of `experts` alone."""
    generator = torch.Generator().manual_seed(5)
    random = lambda *sizes: torch.randn(*sizes, generator=generator).to(dtype)  # noqa: E731
    ids = torch.randint(-1, E, (3, K), generator=generator)
    return ids, random(3, H), random(3, K), random(E, 2 * WIDTH, H)[experts], random(E, H, WIDTH)[experts]


def nodes_buffer(rank, **other):
    return tidegate.ep.NodesBuffer(node=f"node{rank % 2}", **(SIZES | other))


@contextmanager
def one_fails(rank, kind, text):
    """Rank 1 raises its own error, the others say so at once."""
    start = time.monotonic()
    kind, before = (kind, "^") if rank == 1 else (ExpertParallelError, "rank 1 failed: ")
    with pytest.raises(kind, match=before + text):
        yield
    assert time.monotonic() - start < 20  # the timeouts are 60 s


def buffers(rank, ranks):
    """A buffer that differs in anything is made by nobody; neither is one that a rank describes wrongly."""
    shares = [0, 1, 2, E]
    different = [("experts", 7), ("slots", 3), ("row_bytes", 99), ("max_tokens", 5), ("combine", "fast")]
    for name, value in [*different, ("expert_begin", shares)]:
        other = {name: value} | ({"expert_begin": [0, 2, 4, 7]} if name == "experts" else {})
        with pytest.raises(ExpertParallelError, match=f"ep_nodes: rank . and rank . disagree: {name} is "):
            nodes_buffer(rank, **(other if rank == 1 else {}))
    wrong = [
        (dict(experts=0), "experts: expected an integer of at least 1, got 0"),
        (dict(slots=2.5), r"slots: expected an integer of at least 1, got 2\.5"),
        (dict(max_tokens=-1), "max_tokens: expected an integer of at least 0, got -1"),
        (dict(combine="slow"), "combine: expected exact or fast, got slow"),
        (dict(expert_begin=[0, 6]), "expert_begin: expected 4 numbers, got 2"),
        (dict(expert_begin=[0, 3, 2, 6]), "expert_begin: expected numbers that do not decrease from 0 to 6, got "),
    ]
    for options, text in wrong:
        with one_fails(rank, ValueError, "ep_nodes: " + text):
            nodes_buffer(rank, **(options if rank == 1 else {}))
    nodes_buffer(rank).close()


def test_buffers_that_differ(tmp_path):
    run_ranks(3, tmp_path / "ranks", buffers)


def between_nodes(rank, ranks, mode):
    buffer = nodes_buffer(rank, combine=mode)
    ids, x, weights, gate_up, down = make(slice(buffer.expert_begin[rank], buffer.expert_begin[rank + 1]))
    handle = buffer.dispatch(x, ids, weights)
    rows = buffer.expand(handle)
    want, _ = buffer.combine(rows, handle)
    with pytest.raises(ExpertParallelError, match="disagree: weighted is [01] on rank "):
        buffer.combine(rows, handle, weighted=rank == 1)
    kept = weights.clone()
    weights.zero_()  # those of the dispatch count, as they do inside a node
    assert torch.equal(buffer.combine(rows, handle)[0], want) and want.abs().max() > 0
    weights.copy_(kept)
    far = x.to("meta")
    with one_fails(rank, ValueError, "ep_dispatch: x: expected a tensor on cpu, got one on meta"):
        buffer.dispatch(far if rank == 1 else x, ids, weights)
    with one_fails(rank, ValueError, "ep_combine: y: expected a tensor on cpu, got one on meta"):
        buffer.combine(rows.to("meta") if rank == 1 else rows, handle)
    with one_fails(rank, TypeError, "ep_dispatch: ids: expected a tensor, got list"):
        buffer.dispatch(x, ids.tolist() if rank == 1 else ids, weights)
    expected = tidegate.ep.experts(buffer, x, ids, weights, gate_up, down)
    with one_fails(rank, TypeError, "ep_experts: weights: expected a tensor, got NoneType"):
        tidegate.ep.experts(buffer, x, ids, None if rank == 1 else weights, gate_up, down)
    every = make(slice(0, E))[3]
    with one_fails(rank, ValueError, r"ep_experts: gate_up: expected 3 dimensions, the first of size 2 \(experts of"):
        tidegate.ep.experts(buffer, x, ids, weights, every if rank == 1 else gate_up, down)
    buffer.reset()
    assert torch.equal(tidegate.ep.experts(buffer, x, ids, weights, gate_up, down), expected)
    if rank == 1:
        buffer.close()
    with one_fails(rank, ValueError, "ep_dispatch: buffer: expected an open one, got one that was closed"):
        buffer.dispatch(x, ids, weights)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_between_nodes(mode, tmp_path):
    run_ranks(3, tmp_path / "ranks", between_nodes, mode)


def no_experts(rank, ranks):
    """A node without experts gets no row, also with a static shape; the others get as many as without such a node."""
    buffer = nodes_buffer(rank, expert_begin=[0, 3, 3, 6])  # rank 1 is alone on its node
    ids, x, weights, *_ = make(slice(0, E))
    ids = torch.tensor([[0, 3], [5, -1], [2, 4]])
    handle = buffer.dispatch(x, ids, weights, static_shape=True)
    assert handle.shape_rows == (0 if rank == 1 else 9 * K)
    out, _ = buffer.combine(buffer.expand(handle), handle)
    torch.testing.assert_close(out, x * (weights * (ids >= 0)).sum(1, keepdim=True))


def test_static_shape_of_a_node_without_experts(tmp_path):
    run_ranks(3, tmp_path / "ranks", no_experts)


def inside_a_node(rank, ranks):
    """Weights of experts that are wrong on one rank poison the buffer, so nobody waits; with and without gradients."""
    buffer = tidegate.ep.Buffer(**SIZES)
    given = make(slice(buffer.expert_begin[rank], buffer.expert_begin[rank + 1]))
    ids, x, weights, gate_up, down = given
    every = make(slice(0, E))[3]
    wrong = [
        (every, ValueError, r"ep_experts: gate_up: expected 3 dimensions, the first of size 2 \(experts of this rank"),
        (gate_up[:, 1:], ValueError, "(moe_experts_fwd|ep_experts): gate_up: expected .*, got "),
        (gate_up.to("meta"), ValueError, "ep_experts: gate_up: expected a tensor on cpu, got one on meta"),
        (None, TypeError, "ep_experts: gate_up: expected a tensor, got NoneType"),
    ]
    expected = tidegate.ep.experts(buffer, x, ids, weights, gate_up, down)
    for trains in (False, True):
        for bad, kind, text in wrong:
            with one_fails(rank, kind, text):
                tidegate.ep.experts(
                    buffer, x.clone().requires_grad_(trains), ids, weights, bad if rank == 1 else gate_up, down
                )
            buffer.reset()
            assert torch.equal(tidegate.ep.experts(buffer, x, ids, weights, gate_up, down), expected)
    with one_fails(rank, (ValueError, TypeError), "ep_dispatch: x: "):
        buffer.dispatch(x.to("meta") if rank == 1 else x, ids, weights)


def test_inside_a_node(tmp_path):
    run_ranks(3, tmp_path / "ranks", inside_a_node)


def doubles(rank, ranks):
    buffer = tidegate.ep.Buffer(**SIZES)
    ids, x, weights, gate_up, down = make(
        slice(buffer.expert_begin[rank], buffer.expert_begin[rank + 1]), torch.float64
    )
    return tidegate.ep.experts(buffer, x, ids, weights, gate_up, down)


def test_doubles_without_gradients(tmp_path):
    ids, x, weights, gate_up, down = make(slice(0, E), torch.float64)
    want = tidegate.moe_experts(x, ids, weights, gate_up, down, round_y=True)
    for got in run_ranks(2, tmp_path / "ranks", doubles):
        assert torch.equal(got, want)


def reset_between_nodes(rank, ranks, mode):
    """A rank leaves between dispatch and combine. The others hear of it, and after a reset all are in step again."""
    buffer = nodes_buffer(rank, combine=mode)
    ids, x, weights, gate_up, down = make(slice(buffer.expert_begin[rank], buffer.expert_begin[rank + 1]))
    layer = lambda scale: tidegate.ep.experts(buffer, x, ids, weights, scale * gate_up, down)  # noqa: E731
    want = [layer(scale) for scale in (1.0, 2.0)]
    assert not torch.equal(*want)
    for when in ("before combine", "wrong argument", "after combine"):
        handle = buffer.dispatch(x, ids, weights)
        if rank != 1 or when == "after combine":
            rows = buffer.expand(handle)
            if when == "after combine":
                buffer.combine(rows, handle)
            else:
                with pytest.raises(ExpertParallelError, match="disagree: operator is combine on rank . and reset"):
                    buffer.combine(rows[:, :4] if when == "wrong argument" else rows, handle)
        if when == "wrong argument" and rank == 0:
            with pytest.raises(ValueError, match="ep_combine: y: expected 2 dimensions, got 1"):
                buffer.combine(rows[0], handle)
        buffer.reset()
        for _ in range(2):
            for scale, expected in zip((1.0, 2.0), want, strict=True):
                assert torch.equal(layer(scale), expected)
        with pytest.raises(ValueError, match="handle: expected one of a dispatch after the last reset"):
            buffer.combine(x, handle)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_reset_between_nodes(mode, tmp_path):
    run_ranks(3, tmp_path / "ranks", reset_between_nodes, mode)


def wrong_buffers(rank, ranks):
    """A rank that cannot make its buffer is named by the others; so is one between nodes with options of its own."""
    wrong = [
        (dict(expert_begin=[0, 9, 6]), ValueError, "ep_buffer: expert_begin: expected numbers that do not decrease"),
        (dict(timeout=-1.0), ValueError, "ep_buffer: timeout_seconds: expected more than 0, got -1"),
        (dict(experts="6"), (TypeError, RuntimeError, ValueError), ""),
    ]
    for options, kind, text in wrong:
        with one_fails(rank, kind, text):
            tidegate.ep.Buffer(**(SIZES | (options if rank == 1 else {})))
    for options, text in [
        (dict(timeout=-1.0), "timeout: expected more than 0"),
        (dict(zero_experts=2), "zero_experts: "),
    ]:
        with one_fails(rank, ValueError, "ep_nodes: " + text):
            nodes_buffer(rank, **(options if rank == 1 else {}))
    with pytest.raises(ExpertParallelError, match="disagree: timeout is "):
        nodes_buffer(rank, timeout=20.0 + rank)
    buffer = tidegate.ep.Buffer(**SIZES)
    ids, x, weights, *_ = make(slice(0, E))
    handle = buffer.dispatch(x, ids, weights)
    assert buffer.combine(buffer.expand(handle), handle)[0].shape == x.shape


def test_buffers_that_cannot_be_made(tmp_path):
    run_ranks(2, tmp_path / "ranks", wrong_buffers)

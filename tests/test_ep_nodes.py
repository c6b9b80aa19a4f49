"""Expert parallelism between nodes: one row for every token and node, exact and fast. Nodes are names here."""

import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from compare import error
from ep_ranks import run_ranks

import tidegate
from tidegate.errors import ExpertParallelError

pytestmark = pytest.mark.skipif(tidegate.isa() == "fallback", reason="needs the native library")
E, K, H, WIDTH = 10, 4, 24, 8


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def make(counts, dtype):
    generator = torch.Generator().manual_seed(3)
    random = lambda *sizes: torch.randn(*sizes, generator=generator)  # noqa: E731
    total = sum(counts)
    floats = [random(total, H), random(total, K).softmax(1), random(E, 2 * WIDTH, H) / 4, random(E, H, WIDTH) / 3]
    ids = torch.randint(-1, E, (total, K), generator=generator)
    return ids, [f.to(dtype) for f in floats], random(total, H).to(dtype)


def layer(rank, ranks, nodes, counts, dtype, mode):
    buffer = tidegate.ep.NodesBuffer(
        experts=E, slots=K, row_bytes=4 * H, max_tokens=max(counts), node=nodes[rank], combine=mode
    )
    assert buffer.nodes == list(dict.fromkeys(nodes))
    ids, (x, weights, gate_up, down), dout = make(counts, dtype)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    experts = slice(buffer.expert_begin[rank], buffer.expert_begin[rank + 1])
    given = leaves(x[own], weights[own], gate_up[experts], down[experts])
    out = tidegate.ep.experts(buffer, given[0], ids[own], *given[1:])
    out.backward(dout[own])
    with torch.no_grad():
        assert torch.equal(tidegate.ep.experts(buffer, given[0], ids[own], *given[1:]), out)
    # Parts of their own, with a shared expert and a mask that changes nothing.
    handle = buffer.dispatch(x[own], ids[own], weights[own], mask=torch.ones(counts[rank], dtype=torch.bool))
    rows = buffer.expand(handle)
    plain, _ = buffer.combine(rows, handle)
    shared, _ = buffer.combine(rows, handle, shared_x=x[own])
    torch.testing.assert_close(shared, plain + x[own], rtol=2e-2, atol=2e-2)
    sent = sum(len(tokens) for r, tokens in enumerate(handle.sent) if nodes[r] != nodes[rank])
    return [out.detach(), *[t.grad for t in given]], sent


def int8(rank, ranks, nodes, counts, smooth):
    """Rows as int8: dispatch, their sums, and those of one process."""
    sizes = dict(experts=E, slots=K, row_bytes=4 * H)
    alone = tidegate.ep.Buffer([dist.new_group([r]) for r in range(ranks)][rank], max_tokens=sum(counts), **sizes)
    buffer = tidegate.ep.NodesBuffer(max_tokens=max(counts), node=nodes[rank], **sizes)
    ids, (x, weights, *_), _ = make(counts, torch.bfloat16)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    smooth_scale = torch.rand(E, H, generator=torch.Generator().manual_seed(1)) + 0.5 if smooth else None
    results = []
    for b, tokens in ((buffer, own), (alone, slice(None))):
        handle = b.dispatch(x[tokens], ids[tokens], weights[tokens], int8=True, smooth_scale=smooth_scale)
        rows, scales = b.expand(handle)
        assert rows.dtype == torch.int8 and scales.shape == (handle.rows,)
        y = rows * scales[:, None] * (handle.row_expert + b.expert_begin[b.rank] + 1)
        results.append(b.combine(y, handle)[0])
    assert results[1].abs().max() > 1
    assert torch.equal(results[0], results[1][own])
    # What decides the sizes of everything that travels must be equal on all ranks.
    with pytest.raises(ExpertParallelError, match="disagree: bytes of a row is "):
        buffer.dispatch(x[own], ids[own], int8=rank == 1)
    with pytest.raises(ExpertParallelError, match="disagree: slots is "):
        buffer.dispatch(x[own], ids[own, : 2 if rank == 0 else 3], int8=True)
    if smooth:
        given = smooth_scale if rank == 1 else None
        with pytest.raises(ExpertParallelError, match="disagree: bytes of a row is "):
            buffer.dispatch(x[own], ids[own], int8=True, smooth_scale=given)
        with pytest.raises(ExpertParallelError, match="disagree: int8 is "):  # rows of the same type
            buffer.dispatch(x[own], ids[own], int8=rank == 1, smooth_scale=given)


@pytest.mark.parametrize("smooth", [False, True])
def test_int8_rows_over_nodes(smooth, tmp_path):
    run_ranks(4, tmp_path / "ranks", int8, ["a", "b", "a", "b"], [7, 0, 5, 2], smooth)
    run_ranks(3, tmp_path / "uneven", int8, ["a", "b", "b"], [3, 1, 4], smooth)


CASES = [
    (["a", "a", "b", "b"], [16, 3, 0, 9], torch.float32, "exact"),
    (["a", "b", "a"], [4, 5, 6], torch.bfloat16, "exact"),
    (["a", "b", "a", "b"], [7, 0, 5, 2], torch.float32, "fast"),
    (["a", "a", "b", "b"], [16, 3, 0, 9], torch.bfloat16, "fast"),
]


@pytest.mark.parametrize("nodes,counts,dtype,mode", CASES)
def test_layer_over_nodes(nodes, counts, dtype, mode, tmp_path):
    results = run_ranks(len(nodes), tmp_path / "ranks", layer, nodes, counts, dtype, mode)
    ids, floats, dout = make(counts, dtype)
    given = leaves(*floats)
    out = tidegate.moe_experts(given[0], ids, *given[1:], round_y=True)
    out.backward(dout)
    found = [torch.cat(parts) for parts in zip(*[result for result, _ in results], strict=True)]
    want = [out.detach(), *[t.grad for t in given]]
    for name, got, wanted in zip("out dx dweights dgate_up ddown".split(), found, want, strict=True):
        if mode == "exact" and (name in ("out", "dweights") or (name == "dx" and dtype == torch.float32)):
            assert torch.equal(got, wanted), name
        else:  # sums by node, or tokens of an expert in the order of nodes
            assert error(got, wanted) < (1e-6 if dtype == torch.float32 else 6e-3), name
    # One row for every token and node that has one of its experts.
    share = [[E * r // len(nodes), E * (r + 1) // len(nodes)] for r in range(len(nodes))]
    node_of = {e: nodes[r] for r, (begin, end) in enumerate(share) for e in range(begin, end)}
    owner = [nodes[r] for r, count in enumerate(counts) for _ in range(count)]
    pairs = {(t, node_of[e]) for t, row in enumerate(ids.tolist()) for e in row if e >= 0}
    assert sum(sent for _, sent in results) == sum(node != owner[t] for t, node in pairs)


def wrong(rank, ranks):
    # A buffer of one node says so when its ranks are on two.
    with pytest.raises(RuntimeError, match="is on node "):
        tidegate.ep.Buffer(experts=E, slots=K, row_bytes=4 * H, max_tokens=4, node_id=f"node{rank}")


def disagree(rank, ranks, mode):
    """What only some ranks do is an error on all of them, in forward; the buffer can be used on."""
    buffer = tidegate.ep.NodesBuffer(
        experts=E, slots=K, row_bytes=4 * H, max_tokens=4, node=f"node{rank % 2}", combine=mode
    )
    ids, floats, _ = make([3], torch.float32)
    experts = slice(buffer.expert_begin[rank], buffer.expert_begin[rank + 1])
    x, weights, gate_up, down = floats[0], floats[1], floats[2][experts], floats[3][experts]
    with pytest.raises(ExpertParallelError, match="disagree: dtype is torch.b?float16 on rank "):  # as many bytes
        buffer.dispatch(x.to(torch.bfloat16 if rank == 0 else torch.float16), ids)
    with pytest.raises(ExpertParallelError, match="disagree: needs_backward is "):
        tidegate.ep.experts(buffer, x.clone().requires_grad_(rank == 0), ids, weights, gate_up, down)
    with pytest.raises(ExpertParallelError, match="disagree: needs_backward is "):
        tidegate.ep.dispatch(buffer, x.clone().requires_grad_(rank == 0), ids, weights)
    with pytest.raises(ExpertParallelError, match="disagree: gradient of x wanted is "):
        tidegate.ep.experts(buffer, x.clone().requires_grad_(rank == 0), ids, *leaves(weights, gate_up, down))
    given = leaves(weights, gate_up, down)
    tidegate.ep.experts(buffer, x, ids, *given).sum().backward()
    assert given[0].grad.abs().max() > 0


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_ranks_that_disagree(mode, tmp_path):
    run_ranks(3, tmp_path / "ranks", disagree, mode)


@contextmanager
def one_fails(rank, kind, text):
    """Rank 1 raises its own error, the others say so at once."""
    start = time.monotonic()
    kind, before = (kind, "^") if rank == 1 else (ExpertParallelError, "rank 1 failed: ")
    with pytest.raises(kind, match=before + text):
        yield
    assert time.monotonic() - start < 20  # not the timeout of the group


def fail_alone(rank, ranks):
    """Wrong arguments of one rank: it says what is wrong, the others hear of it at once. The buffer can be used on."""
    buffer = tidegate.ep.NodesBuffer(experts=E, slots=K, row_bytes=4 * H, max_tokens=4, node=f"node{rank % 2}")
    ids, (x, weights, *_), _ = make([3], torch.float32)
    good = dict(x=x, ids=ids, weights=weights, mask=None, int8=False, smooth_scale=None)
    factors = torch.ones(E, H)
    cases = [
        (dict(ids=ids + 99), ValueError, r"ids: expected -1 or 0..9, got \d+ to \d+"),
        (dict(ids=ids.long() + 2**32), ValueError, r"ids: expected -1 or 0..9, got \d+ to \d+"),
        (dict(ids=ids.float()), TypeError, "ids: expected dtype int32 or int64, got dtype torch.float32"),
        (dict(ids=ids[:2]), ValueError, r"ids: expected shape \[3, slots\], got \[2, 4\]"),
        (dict(ids=torch.cat([ids, ids], 1)), ValueError, "ids: expected 1 to 4 slots .*, got 8"),
        (dict(weights=torch.ones(3, K + 1)), ValueError, r"weights: expected shape \[3, 4\], got \[3, 5\]"),
        (dict(mask=torch.ones(3)), TypeError, "mask: expected dtype bool, got dtype torch.float32"),
        (dict(mask=torch.ones(2, dtype=torch.bool)), ValueError, r"mask: expected shape \[3\] or \[3, 4\], got \[2\]"),
        (dict(x=x[0]), ValueError, "x: expected 2 dimensions, got 1"),
        (dict(x=x.int()), TypeError, "x: expected dtype in .*, got dtype torch.int32"),
        (dict(x=x.double(), int8=True), TypeError, "x: expected dtype in .*, got dtype torch.float64"),
        (dict(weights=torch.ones(3, K).int()), TypeError, "weights: expected dtype in .*, got dtype torch.int32"),
        (dict(smooth_scale=factors), ValueError, "smooth_scale: expected none without int8, got a tensor"),
        (
            dict(smooth_scale=factors[1:], int8=True),
            ValueError,
            r"smooth_scale: expected shape \[10, 24\], got \[9, 24\]",
        ),
        (dict(smooth_scale=factors.half(), int8=True), TypeError, "smooth_scale: expected dtype in .*, got dtype "),
        (dict(x=torch.cat([x, x])), ValueError, r"x: expected at most 4 tokens .*, got 6"),
        (dict(x=torch.cat([x, x], 1)), ValueError, r"x: expected rows of at most 96 bytes .*, got 192"),
    ]
    for wrong, kind, text in cases:
        with one_fails(rank, kind, "ep_dispatch: " + text):
            buffer.dispatch(**(good | wrong if rank == 1 else good))
    handle = buffer.dispatch(**good)
    assert buffer.combine(buffer.expand(handle), handle)[0].shape == x.shape


def test_wrong_arguments_of_one_rank(tmp_path):
    run_ranks(3, tmp_path / "ranks", fail_alone)


def fail_in_combine(rank, ranks, mode):
    """The same on the way back, and where a rank's experts fail. Nothing has travelled: the handle can be used on."""
    buffer = tidegate.ep.NodesBuffer(
        experts=E, slots=K, row_bytes=4 * H, max_tokens=4, node=f"node{rank % 2}", combine=mode
    )
    ids, (x, weights, gate_up, down), _ = make([3], torch.float32)
    handle = buffer.dispatch(x, ids, weights)
    rows = buffer.expand(handle)
    want, _ = buffer.combine(rows, handle)
    foreign = tidegate.ep.NodesBuffer(experts=E, slots=K, row_bytes=4 * H, max_tokens=4, node=f"node{rank % 2}")
    other = foreign.dispatch(x, ids, weights)
    good = dict(y=rows, handle=handle, weighted=True, weights=None, shared_x=x, row_values=torch.ones(len(rows)))
    only = "weights: expected none in fast mode, got a tensor" if mode == "fast" else None
    cases = [
        (dict(y=torch.cat([rows, x])), ValueError, r"y: expected shape \[\d+, 24\], got \[\d+, 24\]"),
        (dict(y=rows[0]), ValueError, "y: expected 2 dimensions, got 1"),
        (dict(y=rows.int()), TypeError, "y: expected dtype in .*, got dtype torch.int32"),
        (dict(y=torch.cat([rows, rows], 1)), ValueError, "y: expected rows of at most 96 bytes .*, got 192"),
        (dict(weights=weights[:2]), ValueError, only or r"weights: expected shape \[3, 4\], got \[2, 4\]"),
        (dict(weights=ids), (TypeError, ValueError), only or "weights: expected dtype in .*, got dtype torch.int64"),
        (dict(weights=weights, weighted=False), ValueError, only or "weights: expected none in a plain sum"),
        (dict(shared_x=x[:2]), ValueError, r"shared_x: expected shape \[3, 24\], got \[2, 24\]"),
        (dict(shared_x=x.bfloat16()), TypeError, "shared_x: expected dtype in .*, got dtype torch.bfloat16"),
        (dict(row_values=torch.ones(len(rows) + 1)), ValueError, "row_values: expected shape"),
        (dict(row_values=rows[:, 0].double()), TypeError, "row_values: expected dtype in .*, got dtype torch.float64"),
        (dict(handle=other), ValueError, "handle: expected one of this buffer, got one of another"),
    ]
    for wrong, kind, text in cases:
        with one_fails(rank, kind, "ep_combine: " + text):
            buffer.combine(**(good | wrong if rank == 1 else good))
    with one_fails(rank, ValueError, r"ep_dispatch: x: expected shape \[3, 24\], got \[2, 24\]"):
        buffer.redispatch(x[:2] if rank == 1 else x, handle)
    with one_fails(rank, ValueError, "ep_combine: ori_x: expected none between nodes, got a tensor"):
        tidegate.ep.combine(buffer, rows, handle, ori_x=x if rank == 1 else None)
    # Arguments that are right, but not those of the others.
    with pytest.raises(ExpertParallelError, match="ep_combine: .* disagree: dtype is torch.b?float16 on rank "):
        buffer.combine(rows.to(torch.bfloat16 if rank == 1 else torch.float16), handle)
    with pytest.raises(ExpertParallelError, match="disagree: row_values is [01] on rank "):
        buffer.combine(rows, handle, row_values=good["row_values"] if rank == 1 else None)
    with pytest.raises(ExpertParallelError, match="disagree: needs_backward is [01] on rank "):
        tidegate.ep.combine(buffer, rows.clone().requires_grad_(rank == 1), handle)
    with pytest.raises(ExpertParallelError, match="disagree: operator is (redispatch|combine) on rank "):
        buffer.redispatch(x, handle) if rank == 1 else buffer.combine(rows, handle)
    later = buffer.dispatch(x, ids, weights)
    with pytest.raises(ExpertParallelError, match="disagree: handle is [12] on rank "):
        buffer.combine(rows, later if rank == 1 else handle)
    assert torch.equal(buffer.combine(rows, handle)[0], want)
    # Weights of experts, with and without gradients.
    experts = slice(buffer.expert_begin[rank], buffer.expert_begin[rank + 1])
    gate_up, down = gate_up[experts], down[experts]
    for given in ((x, weights, gate_up, down), leaves(x, weights, gate_up, down)):
        x, weights, gate_up, down = given
        with one_fails(rank, ValueError, "moe_experts_fwd: gate_up: expected .*, got "):
            tidegate.ep.experts(buffer, x, ids, weights, gate_up[:, 1:] if rank == 1 else gate_up, down)
        tidegate.ep.experts(buffer, x, ids, weights, gate_up, down)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_wrong_arguments_of_one_rank_in_combine(mode, tmp_path):
    run_ranks(3, tmp_path / "ranks", fail_in_combine, mode)


def test_errors(tmp_path):
    run_ranks(2, tmp_path / "ranks", wrong)

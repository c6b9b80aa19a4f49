"""Expert parallelism between nodes: one row for every token and node, exact and fast. Nodes are names here."""

import time

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


def int8(rank, ranks, nodes, counts):
    """Rows as int8: dispatch, their sums, and those of one process."""
    sizes = dict(experts=E, slots=K, row_bytes=4 * H)
    alone = tidegate.ep.Buffer([dist.new_group([r]) for r in range(ranks)][rank], max_tokens=sum(counts), **sizes)
    buffer = tidegate.ep.NodesBuffer(max_tokens=max(counts), node=nodes[rank], **sizes)
    ids, (x, weights, *_), _ = make(counts, torch.bfloat16)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    results = []
    for b, tokens in ((buffer, own), (alone, slice(None))):
        handle = b.dispatch(x[tokens], ids[tokens], weights[tokens], int8=True)
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


def test_int8_rows_over_nodes(tmp_path):
    run_ranks(4, tmp_path / "ranks", int8, ["a", "b", "a", "b"], [7, 0, 5, 2])


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
    with pytest.raises(ValueError, match="combine: expected exact or fast, got slow"):
        tidegate.ep.NodesBuffer(experts=E, slots=K, row_bytes=4 * H, max_tokens=4, combine="slow")
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


def fail_alone(rank, ranks):
    """Wrong arguments of one rank: it says what is wrong, the others hear of it at once. The buffer can be used on."""
    buffer = tidegate.ep.NodesBuffer(experts=E, slots=K, row_bytes=4 * H, max_tokens=4, node=f"node{rank % 2}")
    ids, (x, weights, *_), _ = make([3], torch.float32)
    good = dict(x=x, ids=ids, weights=weights, mask=None, int8=False)
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
        (dict(x=torch.cat([x, x])), ValueError, r"x: expected at most 4 tokens .*, got 6"),
    ]
    for wrong, kind, text in cases:
        alone = rank == 1
        kind, before = (kind, "^ep_dispatch: ") if alone else (ExpertParallelError, "rank 1 failed: ep_dispatch: ")
        start = time.monotonic()
        with pytest.raises(kind, match=before + text):
            buffer.dispatch(**(good | wrong if alone else good))
        assert time.monotonic() - start < 20  # not the timeout of the group
    handle = buffer.dispatch(**good)
    assert buffer.combine(buffer.expand(handle), handle)[0].shape == x.shape


def test_wrong_arguments_of_one_rank(tmp_path):
    run_ranks(3, tmp_path / "ranks", fail_alone)


def test_errors(tmp_path):
    run_ranks(2, tmp_path / "ranks", wrong)

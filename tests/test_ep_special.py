"""Special experts, which stay at home: gradients as torch has them, and the bits of one process."""

import pytest
import torch
import torch.distributed as dist
from ep_ranks import run_ranks

import tidegate
from tidegate.errors import ExpertParallelError

pytestmark = pytest.mark.skipif(tidegate.isa() == "fallback", reason="needs the native library")
E, K, H, WIDTH, ZERO, COPY, CONST = 5, 4, 40, 8, 1, 2, 3
SPECIAL = ("alpha1", "alpha2", "v")
NAMES = "out dx dweights dgate_up ddown dalpha1 dalpha2 dv".split()


def buffer_of(group=None):
    special = dict(zero_experts=ZERO, copy_experts=COPY, const_experts=CONST)
    return tidegate.ep.Buffer(group, experts=E, slots=K, row_bytes=4 * H, max_tokens=32, timeout=20.0, **special)


def make(total, dtype):
    generator = torch.Generator().manual_seed(4)
    random = lambda *sizes: torch.randn(*sizes, generator=generator).to(dtype)  # noqa: E731
    ids = torch.randint(-1, E + ZERO + COPY + CONST, (total, K), generator=generator)
    ids[total // 2] = E + ZERO + COPY + 1  # one const expert in every slot of a token
    experts = [random(E, 2 * WIDTH, H) / 4, random(E, H, WIDTH) / 3]
    special = [random(CONST), random(CONST), random(CONST, H)]
    return ids, [random(total, H), random(total, K), *experts, *special], random(total, H)


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def step(buffer, ids, floats, dout, parts):
    """Out and all gradients of some tokens."""
    x, weights, gate_up, down, *special = floats
    experts = slice(buffer.expert_begin[buffer.rank], buffer.expert_begin[buffer.rank + 1])
    given = leaves(x, weights, gate_up[experts], down[experts], *special)
    named = dict(zip(SPECIAL, given[4:], strict=True))
    if parts:
        rows, handle = tidegate.ep.dispatch(buffer, given[0], ids, given[1])
        ones = torch.ones_like(handle.row_weights)
        y = tidegate.moe_experts(rows, handle.row_expert, ones, given[2], given[3], round_y=True)
        out = tidegate.ep.combine(buffer, y, handle, rows=rows, ori_x=given[0], **named)
    else:
        out = tidegate.ep.experts(buffer, given[0], ids, *given[1:4], **named)
        with torch.no_grad():
            assert torch.equal(tidegate.ep.experts(buffer, given[0], ids, *given[1:4], **named), out)
    out.backward(dout)
    return [out.detach(), *[t.grad for t in given]]


def layer(rank, ranks, counts, dtype, parts):
    """This rank's tokens among those of all ranks; the same in one process; all tokens in one process."""
    alone = buffer_of([dist.new_group([r]) for r in range(ranks)][rank])
    ids, (x, weights, *replicated), dout = make(sum(counts), dtype)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    mine = (ids[own], [x[own], weights[own], *replicated], dout[own], parts)
    return (
        step(buffer_of(), *mine),
        step(alone, *mine),
        step(alone, ids, [x, weights, *replicated], dout, parts) if rank == 0 else None,
    )


def plain(counts):
    """The same in torch."""
    ids, floats, dout = make(sum(counts), torch.float32)
    x, weights, gate_up, down, alpha1, alpha2, v = given = leaves(*floats)
    out = torch.zeros_like(x)
    for t, row in enumerate(ids.tolist()):
        for k, e in enumerate(row):
            if 0 <= e < E:
                gate, up = (gate_up[e] @ x[t]).chunk(2)
                y = down[e] @ (torch.nn.functional.silu(gate) * up)
            elif E + ZERO <= e < E + ZERO + COPY:
                y = x[t]
            elif e >= E + ZERO + COPY:
                c = e - E - ZERO - COPY
                y = alpha1[c] * x[t] + alpha2[c] * v[c]
            else:
                continue
            out = out.index_add(0, torch.tensor([t]), (weights[t, k] * y)[None])
    out.backward(dout)
    return [out.detach(), *[t.grad for t in given]]


CASES = [([9], torch.float32), ([5, 4], torch.bfloat16), ([1, 0, 8], torch.float32), ([3, 2, 1, 7], torch.bfloat16)]


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("counts,dtype", CASES)
def test_gradients_have_the_bits_of_one_process(counts, dtype, parts, tmp_path):
    found, alone, (one, *_) = zip(*run_ranks(len(counts), tmp_path / "ranks", layer, counts, dtype, parts), strict=True)
    for i, name in enumerate(NAMES[:5]):
        assert torch.equal(torch.cat([result[i] for result in found]), one[i]), name
    for i, name in enumerate(NAMES[5:], 5):  # replicated: every rank has the part of its tokens
        assert all(torch.equal(f[i], a[i]) for f, a in zip(found, alone, strict=True)), name
    if dtype == torch.float32:
        for name, got, want in zip(NAMES, one, plain(counts), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("big", [float("nan"), float("inf"), 1e20])  # the last: <dout, x> overflows
def test_a_token_that_is_not_finite_only_reaches_its_special_experts(big):
    ids, floats, dout = make(9, torch.float32)
    x, weights, gate_up, _, *special = given = leaves(*floats)
    ids[2], ids[3] = -1, torch.tensor([0, E, -1, E + ZERO])  # an ordinary expert, a zero expert, none, a copy
    with torch.no_grad():
        x[2:4] = big
        gate_up.zero_()  # ordinary experts give 0 of what is finite
    dout[2:4] = 1e20
    out = tidegate.ep.experts(buffer_of(), x, ids, *given[1:4], **dict(zip(SPECIAL, special, strict=True)))
    out.backward(dout)
    assert weights.grad[2].tolist() == [0.0] * K
    assert weights.grad[3, 1:3].tolist() == [0.0] * 2 and not weights.grad[3, 3].isfinite()
    if big == 1e20:
        assert weights.grad[3, 0] == 0
    assert torch.cat([weights.grad[:2], weights.grad[4:]]).isfinite().all()


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
def test_weights_that_changed_before_backward_are_an_error(parts):
    ids, floats, dout = make(9, torch.float32)
    buffer, (x, weights, gate_up, down, *special) = buffer_of(), leaves(*floats)
    named, used = dict(zip(SPECIAL, special, strict=True)), weights * 1
    if parts:
        rows, handle = tidegate.ep.dispatch(buffer, x, ids, used)
        out = tidegate.ep.combine(buffer, rows * 2, handle, rows=rows, ori_x=x, **named)
    else:
        out = tidegate.ep.experts(buffer, x, ids, used, gate_up, down, **named)
    with torch.no_grad():
        used.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


def errors(rank, ranks):
    buffer = buffer_of()
    x, ids = torch.zeros(3, H), torch.full((3, K), E + ZERO + COPY)
    alpha, v = torch.ones(CONST), torch.zeros(CONST, H)
    handle = buffer.dispatch(x, ids)
    y = x[: handle.rows]
    # Only one rank wants a gradient: it would wait for the others in backward.
    with pytest.raises(ExpertParallelError, match="disagree: needs_backward is"):
        tidegate.ep.combine(
            buffer, y, handle, ori_x=x, alpha1=alpha.clone().requires_grad_(rank == 1), alpha2=alpha, v=v
        )
    dist.barrier()
    buffer.reset()
    handle = buffer.dispatch(x, ids)
    wrong = alpha[:2] if rank == 0 else alpha
    error, text = (
        (ValueError, r"^ep_combine: alpha1: expected shape \[3\], got \[2\]")
        if rank == 0
        else (ExpertParallelError, "rank 0 failed: ep_combine: alpha1: expected shape")
    )
    with pytest.raises(error, match=text):
        tidegate.ep.combine(buffer, y, handle, ori_x=x, alpha1=wrong.clone().requires_grad_(), alpha2=alpha, v=v)
    nodes = tidegate.ep.NodesBuffer(experts=E, slots=K, row_bytes=4 * H, max_tokens=4, node=f"node{rank}")
    with pytest.raises(ValueError, match="ep_experts: v: expected none between nodes, got a tensor"):
        tidegate.ep.experts(nodes, x, ids, torch.ones(3, K), v, v, v=v)


def test_errors(tmp_path):
    run_ranks(2, tmp_path / "ranks", errors)

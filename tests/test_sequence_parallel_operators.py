"""Convolution, delta rule and attention on shards against one process: bits where they are promised, and bytes."""

import pytest
import ranks as harness
import torch

from tidegate.packed.attention import packed_attention
from tidegate.parallel import linear_attention
from tidegate.parallel.attention import attend
from tidegate.parallel.choice import Heads, payload
from tidegate.parallel.link import Link
from tidegate.parallel.plan import SpPlan, split

WORLD = 4
HK, HV, K, V = 4, 8, 32, 32
TAPS = 4
ONE, PACK = (0, 640), (0, 5, 70, 71, 300, 640)
CUTS = {  # where 2, 3 and 4 shards begin
    "even": lambda cu, p: split(cu, p),
    "grid": lambda cu, p: tuple(cu[-1] // 64 * r // p * 64 for r in range(p)) + (cu[-1],),  # of one sequence
    "uneven": lambda cu, p: (0, *(7 + 90 * r for r in range(1, p)), cu[-1]),
    "empty": lambda cu, p: (0, *(320 for _ in range(1, p)), cu[-1]),
    "short": lambda cu, p: (0, *(cu[-1] - 4 + r for r in range(1, p)), cu[-1]),  # shards of one token
}
NAMES = ("mixed", "a", "b", "weight", "A_log", "dt_bias")


def inputs(tokens, sizes, dtype=torch.float32):
    HK, HV, K, V = sizes
    torch.manual_seed(1)
    channels = 2 * HK * K + HV * V
    shapes = (1, tokens, channels), (1, tokens, HV), (1, tokens, HV), (channels, TAPS), (HV,), (HV,)
    return [torch.randn(shape).to(dtype) for shape in shapes], torch.randn(1, tokens, HV, V).to(dtype)


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def all_to_all(self, buffer, sends, receives, purpose):
        return buffer.clone()


def mix(plan, sizes, tensors, do):
    """o and the gradients of all inputs, of a shard."""
    own = plan.own
    tensors = [(t[:, own.begin : own.end] if i < 3 else t).clone().requires_grad_() for i, t in enumerate(tensors)]
    mixed, a, b, weight, A_log, dt_bias = tensors
    how = linear_attention.by_heads if plan.linear == "heads" else linear_attention.by_states
    o = how(plan, sizes, mixed, a, b, weight, None, A_log, dt_bias)
    return o.detach(), torch.autograd.grad(o, tensors, do[:, own.begin : own.end])


def compare(plan, sizes, exact, dtype=torch.float32):
    """exact: the bits of one process. But sums over tokens have them only where one rank holds all tokens, and the
    last rows in front of a cut get their gradient from both sides of it."""
    tensors, do = inputs(plan.cu[-1], sizes, dtype)
    alone = SpPlan(Alone(), (0, plan.cu[-1]), plan.cu, "heads")
    got, want = mix(plan, sizes, tensors, do), mix(alone, sizes, tensors, do)
    own, by_heads = slice(plan.own.begin, plan.own.end), plan.linear == "heads"
    rounding = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1.8e-3}[dtype]
    pairs = [("o", got[0], want[0][:, own])]
    pairs += [(n, g, w[:, own]) for n, g, w in zip(NAMES[:3], got[1][:3], want[1][:3], strict=True)]
    for name, mine, whole in pairs:
        edge = TAPS - 1 if name == "mixed" and plan.own.gives and not by_heads else 0
        if exact:
            assert torch.equal(*(x[:, : x.shape[1] - edge] for x in (mine, whole))), name
        if not exact or edge:
            check(name, mine, whole, rounding)
    truth = None
    for i, name in enumerate(NAMES[3:], 3):
        total = got[1][i].to(want[1][i].dtype if by_heads else torch.promote_types(dtype, torch.float32))
        torch.distributed.all_reduce(total, group=plan.link.group)
        if by_heads:
            assert torch.equal(total, want[1][i]), name
        elif distance(total, want[1][i]) > (2 * rounding if dtype == torch.bfloat16 else rounding):
            # Fp64 decides, and one process's distance from it; of gates, 1e-6 of terms that nearly cancel in the sum.
            truth = truth or mix(alone, sizes, [t.double() for t in tensors], do.double())[1]
            if terms := gate_terms(name, tensors, truth):
                assert float((total.double() - want[1][i].double()).norm() / terms) <= rounding, name
            else:
                check(name, total, truth[i], 2 * distance(want[1][i], truth[i]))


def gate_terms(name, tensors, truth):
    """The norm of the sums of absolute terms of dt_bias (the gradient of a) or A_log, as in sequence_case.far."""
    _, a, _, _, _, dt_bias = (t.double() for t in tensors)
    z = a + dt_bias
    factor = {"dt_bias": 1.0, "A_log": torch.nn.functional.softplus(z) / z.sigmoid()}.get(name)
    return None if factor is None else float((truth[1] * factor).abs().sum((0, 1)).norm())


def distance(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm()) if want.numel() else 0.0


def check(name, got, want, limit):
    assert distance(got, want) <= limit, f"{name}: {distance(got, want)}"


def cases():
    found = {}

    def add(name, size, function):
        def case(ranks):
            if ranks.rank < size:
                function(Link(ranks.groups[size]))

        found[name] = case

    def rule(mode, cut, cu, sizes=(HK, HV, K, V), exact=False, dtype=torch.float32):
        return lambda link: compare(SpPlan(link, CUTS[cut](cu, link.size), cu, mode), sizes, exact, dtype)

    for p in (2, 3, 4):
        for label, cu in (("one", ONE), ("pack", PACK)):
            for cut in ("even", "uneven", "empty", "short"):
                add(f"heads-{p}-{label}-{cut}", p, rule("heads", cut, cu, exact=True))
                add(f"chain-{p}-{label}-{cut}", p, rule("chain", cut, cu))
                add(f"scan-{p}-{label}-{cut}", p, rule("scan", cut, cu))
        add(f"chain-{p}-one-grid", p, rule("chain", "grid", ONE, exact=True))
        add(f"bytes-{p}", p, check_bytes)
        for cut in ("even", "uneven", "empty", "short"):
            add(f"ring-{p}-{cut}", p, lambda link, cut=cut: check_attention(link, "ring", cut))
        add(f"attention-heads-{p}", p, lambda link: check_attention(link, "heads", "uneven"))
    add("chain-3-two-heads", 3, rule("chain", "even", PACK, (2, 6, 16, 24)))  # fewer heads than ranks, K != V
    add("scan-3-two-heads", 3, rule("scan", "even", PACK, (2, 6, 16, 24)))
    add("heads-3-uneven-heads", 3, rule("heads", "even", PACK, (4, 12, 16, 24), True))
    add("chain-2-bf16", 2, rule("chain", "grid", ONE, exact=True, dtype=torch.bfloat16))
    add("scan-2-bf16", 2, rule("scan", "even", PACK, dtype=torch.bfloat16))
    for mode in ("chain", "scan"):
        add(f"{mode}-4-fp64", 4, rule(mode, "uneven", PACK, (2, 4, 16, 24), dtype=torch.float64))
    add("heads-2-bf16", 2, rule("heads", "even", PACK, exact=True, dtype=torch.bfloat16))
    return found


def check_bytes(link):
    """What leaves a rank is what the table of docs/sequence-parallel.md says, to the byte."""
    p, tokens, sizes = link.size, 1024, (HK, HV, K, V)
    channels, heads = 2 * HK * K + HV * V, Heads(*sizes, 0)
    tensors, do = inputs(tokens, sizes)
    for mode in ("heads", "chain", "scan"):
        link.traffic = {}
        plan = SpPlan(link, split((0, tokens), p), (0, tokens), mode)
        own = plan.own
        mixed, a, b, *rest = tensors
        local = [t[:, own.begin : own.end] for t in (mixed, a, b)]
        how = linear_attention.by_heads if mode == "heads" else linear_attention.by_states
        how(plan, sizes, *local, rest[0], None, *rest[1:])
        state = link.traffic.get("state", (0, 0, 0))
        if mode == "heads":
            keys = [HK * (r + 1) // p - HK * r // p for r in range(p)]
            width = 2 * K + 2 * HV // HK * V + 2 * HV // HK  # q, k, v, o, a and b of a key head
            into = own.tokens * (HK - keys[link.rank]) * (width - HV // HK * V)
            back = (tokens - own.tokens) * keys[link.rank] * (HV // HK) * V
            assert link.traffic["heads"].sent == 4 * (into + back)
            if tokens % p == 0:
                assert link.traffic["heads"].sent == payload(mode, heads, own.tokens, p, 4)
            continue
        rows = (TAPS - 1) if own.gives else 0
        assert link.traffic["halo"].sent == 4 * rows * channels
        if mode == "chain":
            assert state[1] == (4 * HV * K * V if own.gives else 0)
            assert link.rank == p - 1 or state[2] == payload(mode, heads, own.tokens, p, 4)
        else:
            assert state[:2] == (1, 4 * HV * (K * K + K * V))
            assert state[2] == payload(mode, heads, own.tokens, p, 4)


def check_attention(link, mode, cut):
    H, Hkv, D, cu = 8, 4 if mode == "heads" else 2, 16, PACK
    torch.manual_seed(2)
    whole = [torch.randn(1, n, cu[-1], D) for n in (H, Hkv, Hkv)]
    grad = torch.randn(1, cu[-1], H, D)
    plan = SpPlan(link, CUTS[cut](cu, link.size), cu, attention=mode)
    own = slice(plan.own.begin, plan.own.end)
    local = [x[:, :, own].clone().requires_grad_() for x in whole]
    out = attend(plan, *local, D**-0.5)
    found = torch.autograd.grad(out, local, grad[:, own])
    leaves = [x.clone().requires_grad_() for x in whole]
    want = packed_attention(*leaves, plan.whole_cu, D**-0.5)[0].transpose(1, 2)
    gradients = torch.autograd.grad(want, leaves, grad)
    pairs = [(out, want[:, own]), *((a, b[:, :, own]) for a, b in zip(found, gradients, strict=True))]
    for got, expected in pairs:
        if mode == "heads":
            assert torch.equal(got, expected)
        else:
            check("attention", got.detach(), expected.detach(), 1e-6)


NAMES_OF_CASES = list(cases())


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return harness.run(cases, NAMES_OF_CASES, WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES_OF_CASES)
def test_shards(failures, name):
    assert not failures[name], "\n".join(failures[name])

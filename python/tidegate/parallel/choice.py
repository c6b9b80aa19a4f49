"""Which way a step goes: a pure function of heads, lengths and of what this machine was measured to take."""

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from tidegate._native import ops

LINEAR = ("heads", "chain", "scan")
ATTENTION = ("heads", "ring")
SCAN_WORK = 7 / 3  # operations of a scan (map and rule), relative to the rule alone


class Heads(NamedTuple):
    """Of the linear-attention layers, and the KV heads of full attention (0: there is none)."""

    HK: int
    HV: int
    K: int
    V: int
    KV: int


class Costs(NamedTuple):
    """Seconds: of an exchange of nothing, of a byte that leaves a rank, of a token through the rule of all heads."""

    latency: float
    byte: float
    token: float


def refusal(mode, heads, ranks):
    """Why a mode cannot be taken, or None."""
    if mode == "heads" and heads.HK < ranks:
        return f"head split needs a key head a rank: {heads.HK} key heads for {ranks} ranks; use mode='chain'"
    return None


def attention_mode(asked, heads, ranks):
    if asked == "auto":
        return "heads" if heads.KV >= ranks else "ring"
    if asked == "heads" and 0 < heads.KV < ranks:
        raise ValueError(f"attention='heads' needs a KV head a rank: {heads.KV} KV heads for {ranks} ranks; use 'ring'")
    return asked


def payload(mode, heads, tokens, ranks, element):
    """Bytes that leave a rank in the forward of a layer, without the halo. tokens: of a shard."""
    HK, HV, K, V, _ = heads
    if mode == "heads":
        return (2 * HK * K + 2 * HV * V + 2 * HV) * element * tokens * (ranks - 1) // ranks
    return 4 * HV * K * V if mode == "chain" else 4 * HV * K * (K + V) * (ranks - 1)


def seconds(mode, heads, tokens, ranks, groups, element, costs):
    """The forward of one layer between its projections: messages, the rule, and waiting for neighbours."""
    sent = payload(mode, heads, tokens, ranks, element) * costs.byte
    rule = tokens * costs.token
    if mode == "heads":
        return 2 * costs.latency + sent + rule
    if mode == "scan":
        return 2 * costs.latency + sent + rule * SCAN_WORK
    wait = (ranks - 1) * (costs.latency + (rule + sent) / groups)
    return costs.latency + sent + rule + wait


def choose(heads, tokens, ranks, groups, element, costs):
    """(mode, reason)"""
    found = {
        mode: seconds(mode, heads, tokens, ranks, groups, element, costs)
        for mode in LINEAR
        if refusal(mode, heads, ranks) is None
    }
    best = min(found, key=found.get)
    times = ", ".join(f"{mode} {1e3 * t:.2f} ms" for mode, t in found.items())
    return best, f"{tokens} tokens a rank, expected for a layer: {times}"


def _best(call, repeat=3):
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(link, heads, dtype):
    """The costs as the slowest rank finds them, the same on all ranks."""
    HK, HV, K, V, _ = heads
    small, large = link.size, link.size * (1 << 20)
    times = []
    for size in (small, large):
        buffer, share = torch.zeros(size, dtype=torch.uint8), [size // link.size] * link.size
        times.append(_best(lambda: link.all_to_all(buffer, share, share, "measure")))  # noqa: B023
    T = 128
    q, v = torch.ones(1, HK, T, K, dtype=dtype), torch.ones(1, HV, T, V, dtype=dtype)
    gate = torch.zeros(1, HV, T)
    token = _best(lambda: ops.chunk_gated_delta_rule_fwd(q, q, v, gate, gate, use_qk_l2norm=True, layout="BNSD"), 3)
    left = (large - small) * (link.size - 1) / link.size
    found = torch.tensor([times[0], max(times[1] - times[0], 0.0) / left, token / T], dtype=torch.float64)
    return Costs(*link.sum(found, "measure", dist.ReduceOp.MAX).tolist())

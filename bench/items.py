"""Work items as data: what is computed, on which sizes, how many bytes or operations it has to move, and its inputs.

Letters: B rows, T tokens, D channels, W taps, HK key heads, HV value heads, K = V = 128 head sizes, R rotated channels,
E experts, H channels of a token, WIDTH inside an expert, SLOTS experts a token.
"""

import functools
import itertools
import math
import zlib
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

K = V = 128
H, WIDTH, SLOTS = 2048, 512, 8
EXPERT = 6 * H * WIDTH  # bytes of one in bf16, and operations for one token
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Item:
    name: str
    kind: str  # the operator; engines have one entry a kind
    what: str
    sizes: dict = field(default_factory=dict)
    bytes: int = 0  # what has to be read and written once, in the item's own types; 0: bound by arithmetic
    flop: int = 0  # delta rule: recurrence-equivalent, 6 K V per token and value head, whatever an engine executes
    sets: int = 2  # input sets that calls rotate through; enough of them that small items do not live in one cache
    reads: bool = False  # bytes are read, hardly any are written

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sequence of a delta rule item."""
        s = self.sizes
        return list(s["lengths"]) if "lengths" in s else [s["T"]] * s["B"]

    @property
    def cu(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last-plus-one token of every sequence."""
        return list(itertools.pairwise(self.cu))


def _rule(name, what, HK=16, HV=32, kind="prefill", passes=1, **sizes):
    tokens = sum(sizes["lengths"]) if "lengths" in sizes else sizes["B"] * sizes["T"]
    return Item(name, kind, what, dict(HK=HK, HV=HV, **sizes), flop=passes * 6 * K * V * tokens * HV)


def _decode(B, sets):
    sizes, what = dict(B=B, T=1, HK=16, HV=32), f"delta rule, one token for each of {B} sequences"
    return Item(f"D1_B{B}", "decode", what, sizes, bytes=8 * B * 32 * K * V, sets=sets)


def _layer(B, sets):
    sizes, what = dict(B=B, HK=16, HV=32, W=4), f"a layer between its projections, one token for each of {B} sequences"
    return Item(f"L1_B{B}", "layer_step", what, sizes, bytes=8 * B * 32 * K * V, sets=sets)


def _rows(name, kind, what, shape, tensors):
    return Item(name, kind, what, dict(shape=shape), bytes=2 * tensors * math.prod(shape))


def _gate(name, shape, sets):
    what, size = f"log decay and write strength, {list(shape)}", 2 + 2 + 4 + 2  # a, b; g in fp32, beta
    return Item(name, "gating", what, dict(shape=shape), bytes=size * math.prod(shape), sets=sets)


def _experts(E, T):
    """Few tokens: bound by reading the experts that they hit (moved() counts them); many: by arithmetic."""
    what, sizes = f"experts, {SLOTS} of {E} for each of {T} tokens", dict(E=E, T=T)
    if T <= 16:
        return Item(f"M_E{E}_T{T}", "experts", what, sizes, bytes=min(E, T * SLOTS) * EXPERT, sets=8, reads=True)
    return Item(f"M_E{E}_T{T}", "experts", what, sizes, flop=T * SLOTS * EXPERT)


def _experts_bwd(E, T):
    what = f"all gradients of experts, {SLOTS} of {E} for each of {T} tokens"
    return Item(f"MB_E{E}_T{T}", "experts_bwd", what, dict(E=E, T=T), flop=2 * T * SLOTS * EXPERT)


ITEMS = {
    item.name: item
    for item in [
        Item("C1", "conv", "causal conv + SiLU, T=4096 D=8192 W=4", dict(T=4096, D=8192, W=4), bytes=4 * 4096 * 8192),
        # x and y, the state's three columns twice
        Item("C2", "conv_update", "conv step, B=64 D=8192 W=4", dict(B=64, D=8192, W=4), bytes=16 * 64 * 8192, sets=8),
        Item("C1B", "conv_bwd", "gradients of C1", dict(T=4096, D=8192, W=4), bytes=6 * 4096 * 8192),
        _rows("NORM", "norm_gated", "gated RMSNorm, [4096, 32, 128]", (4096, 32, 128), 3),
        _rows("L2", "l2norm", "l2norm, [4096, 32, 128]", (4096, 32, 128), 2),
        _gate("GATE", (4096, 32, 128), 2),
        _gate("GATE_LAYER", (1, 4096, 32), 8),
        _rows("RMS", "rms_norm", "zero-centred RMSNorm, [4096, 2048]", (4096, 2048), 2),
        _rows("ROPE", "rope", "rotary embedding, [1, 16, 4096, 256], R=64", (1, 16, 4096, 256), 2),
        _rule("P1", "delta rule prefill, T=4096 16/32 heads", B=1, T=4096),
        _rule("P2", "delta rule prefill, B=8 T=1024 32/32 heads", HK=32, B=8, T=1024),
        _rule("P3", "delta rule prefill, 8 packed sequences", lengths=(17, 61, 128, 200, 333, 777, 1500, 2048)),
        _rule("S1", "delta rule smoke, 3 short packed sequences", lengths=(17, 61, 72)),
        _decode(1, 8),
        _decode(16, 2),
        _decode(64, 1),
        _layer(1, 8),
        _layer(16, 2),
        _rule("BW", "delta rule forward + backward, T=2048", kind="train", passes=3, B=1, T=2048),
        *(_experts(E, T) for E in (64, 256) for T in (1, 16, 256, 2048)),
        *(_experts_bwd(64, T) for T in (512, 2048)),
    ]
}


def select(names: list[str]) -> list[Item]:
    """Items by name; a family name takes all of its members (D1 = D1_B1, D1_B16, D1_B64; M_E64 = M_E64_T1, ...)."""
    found = []
    for name in names:
        members = [ITEMS[name]] if name in ITEMS else [i for i in ITEMS.values() if i.name.startswith(name + "_")]
        if not members:
            raise ValueError(f"--items: expected names from {', '.join(ITEMS)}, got {name}")
        found += [m for m in members if m not in found]
    return found


def inputs(item: Item, index: int) -> dict:
    """Input set number `index`. The same item and index give the same values in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{item.name}/{index}".encode()))

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def uniform(n, low, high):
        return torch.empty(n).uniform_(low, high, generator=generator)

    return _MAKERS[item.kind](item.sizes, normal, uniform)


def moved(item: Item, sets: list[dict]) -> int:
    """The item's bytes; of experts those that these inputs hit, on average."""
    if not item.reads:
        return item.bytes
    return EXPERT * sum(len(x["ids"].unique()) for x in sets) // len(sets)


def _gates(shape, normal, uniform):
    """Gates as trained models are initialised: A uniform, dt log-uniform, dt_bias the inverse softplus of dt."""
    HV = shape[-1]
    A, dt = uniform(HV, 0.01, 16), torch.exp(uniform(HV, math.log(1e-3), math.log(0.1)))
    dt_bias = (dt + torch.log(-torch.expm1(-dt))).to(BF16)
    return dict(a=(0.5 * normal(*shape)).to(BF16), b=normal(*shape).to(BF16), A_log=A.log(), dt_bias=dt_bias)


def _delta_rule(s, normal, uniform):
    B, T = (1, sum(s["lengths"])) if "lengths" in s else (s["B"], s["T"])
    HK, HV = s["HK"], s["HV"]
    x = {n: F.normalize(normal(B, T, HK, K), dim=-1).to(BF16) for n in ("q", "k")}
    x |= dict(v=normal(B, T, HV, V).to(BF16)) | _gates((B, T, HV), normal, uniform)
    x["g"] = -x["A_log"].exp() * F.softplus(x["a"].float() + x["dt_bias"].float())
    x["beta"] = torch.sigmoid(x["b"].float()).to(BF16)
    return x


def _delta_step(s, normal, uniform):
    x = _delta_rule(s, normal, uniform)
    # Engines that take raw gates never round beta, so nobody gets a rounded one here.
    x["beta"] = torch.sigmoid(x["b"].float())
    return x | dict(state=0.1 * normal(s["B"], s["HV"], K, V))


def _layer_step(s, normal, uniform):
    B, HV, D = s["B"], s["HV"], 2 * s["HK"] * K + s["HV"] * V
    x = dict(mixed=normal(B, D).to(BF16), z=normal(B, HV * V).to(BF16)) | _gates((B, HV), normal, uniform)
    x |= dict(w=(0.5 * normal(D, s["W"])).to(BF16), conv=normal(B, D, s["W"] - 1).to(BF16))
    return x | dict(norm=(1 + 0.1 * normal(V)).to(BF16), state=0.1 * normal(B, HV, K, V))


def _train(s, normal, uniform):
    x = _delta_rule(s, normal, uniform)
    return x | dict(do=normal(*x["v"].shape).to(BF16))


def _conv(s, normal, uniform):
    return dict(x=normal(s["T"], s["D"]).to(BF16), w=(0.5 * normal(s["D"], s["W"])).to(BF16))


def _conv_bwd(s, normal, uniform):
    return _conv(s, normal, uniform) | dict(dy=normal(s["T"], s["D"]).to(BF16))


def _conv_update(s, normal, uniform):
    x = _conv(dict(s, T=s["B"]), normal, uniform)
    return x | dict(state=normal(s["B"], s["D"], s["W"] - 1).to(BF16))


def _norm_gated(s, normal, uniform):
    weight = (1 + 0.1 * normal(s["shape"][-1])).to(BF16)
    return dict(x=normal(*s["shape"]).to(BF16), z=normal(*s["shape"]).to(BF16), w=weight)


def _rms_norm(s, normal, uniform):
    # Multiples of 1/128 below 1/2: w and 1 + w are both exact in bf16, so engines with a plain weight compute the same.
    weight = (normal(s["shape"][-1]).mul(12.8).round() / 128).clamp(-0.5, 0.5)
    return dict(x=normal(*s["shape"]).to(BF16), w=weight.to(BF16))


def _rope(s, normal, uniform, R=64, theta=1e7):
    B, _, T, _ = s["shape"]
    angle = torch.arange(T)[:, None] * theta ** (-torch.arange(0, R, 2) / R)
    angle = torch.cat([angle, angle], -1).expand(B, T, R)
    return dict(x=normal(*s["shape"]).to(BF16), cos=angle.cos().to(BF16), sin=angle.sin().to(BF16))


@functools.lru_cache(maxsize=1)
def _layer_of_experts(E):
    """One for all inputs of an item: it is the size of the model. "made" is where engines keep what they made of it."""
    generator = torch.Generator().manual_seed(E)

    def normal(*shape):
        w = torch.empty(E, *shape, dtype=BF16)
        for matrix in w:  # in fp32 the whole would take twice its memory once more
            matrix.copy_(0.02 * torch.randn(*shape, generator=generator))
        return w

    return dict(gate_up=normal(2 * WIDTH, H), down=normal(H, WIDTH), router=normal(H).float(), made={})


def _routed(s, normal, uniform):
    layer, x = _layer_of_experts(s["E"]), normal(s["T"], H).to(BF16)
    weights, ids = (x.float() @ layer["router"].T).softmax(-1).topk(SLOTS)
    return dict(x=x, ids=ids.int(), weights=weights / weights.sum(-1, keepdim=True)) | layer


def _routed_bwd(s, normal, uniform):
    return _routed(s, normal, uniform) | dict(dout=normal(s["T"], H).to(BF16))


_MAKERS = {
    "prefill": _delta_rule,
    "decode": _delta_step,
    "layer_step": _layer_step,
    "train": _train,
    "conv": _conv,
    "conv_bwd": _conv_bwd,
    "conv_update": _conv_update,
    "norm_gated": _norm_gated,
    "l2norm": lambda s, normal, uniform: dict(x=normal(*s["shape"]).to(BF16)),
    "gating": lambda s, normal, uniform: _gates(s["shape"], normal, uniform),
    "rms_norm": _rms_norm,
    "rope": _rope,
    "experts": _routed,
    "experts_bwd": _routed_bwd,
}

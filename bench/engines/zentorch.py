"""zentorch's operator library. Delta rule states are V-first, and slot 0 of a pool is reserved."""

import importlib.util
import itertools
import os

import torch

from engines import Absent, Run
from engines.experts import made
from items import BF16, K, V

PACKAGES = {"zentorch": "2.14"}
LACKS = {
    "train": "no backward",
    "conv_bwd": "no backward",
    "experts_bwd": "no backward",
    "gating": "only inside a fused operator that also splits q, k, v",
}
_PACKED = "gates from a, b inside; q, k, v packed beforehand"
_Z = None


def load(threads):
    global _Z
    folder = importlib.util.find_spec("zentorch").submodule_search_locations[0]
    torch.ops.load_library(os.path.join(folder, "libzentorch.so"))
    torch.set_num_threads(threads)
    _Z = torch.ops.zentorch


def _needs_avx512():
    """These operators are AVX-512 code without a check: elsewhere the process dies of an illegal instruction."""
    if not torch.cpu._is_avx512_supported():
        raise Absent("needs AVX-512 (illegal instruction on this CPU)")


def _prefill(item, x):
    _needs_avx512()
    chunks = [(n + 63) // 64 for n in item.lengths]
    index = torch.tensor([(i, c) for i, m in enumerate(chunks) for c in range(m)], dtype=torch.int32)
    offsets = torch.tensor([0, *itertools.accumulate(chunks)], dtype=torch.int32)
    q, k, v, g, beta = (x[n].flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta"))
    beta, cu = beta.float(), torch.tensor(item.cu, dtype=torch.int32)
    zeros = torch.zeros(len(chunks), item.sizes["HV"], V, K)

    def call():
        return _Z.gdn_chunk_gated_delta_rule_fwd(q, k, v, g, beta, K**-0.5, zeros, True, 64, cu, index, offsets)

    return Run(call, lambda r: {"o": r[0].view(x["v"].shape), "S": r[1].transpose(-1, -2)}, "beta fp32")


def _decode(item, x):
    _needs_avx512()
    B, HV = item.sizes["B"], item.sizes["HV"]
    mixed = torch.cat([x[n].reshape(B, -1) for n in ("q", "k", "v")], 1).contiguous()
    a, b, bias = x["a"][:, 0], x["b"][:, 0], x["dt_bias"].float()
    pool = torch.zeros(B + 1, HV, V, K)
    pool[1:] = x["state"].transpose(-1, -2)
    slots, out = torch.arange(1, B + 1, dtype=torch.int32), torch.empty(B, 1, HV, V, dtype=BF16)
    step = _Z.gdn_fused_recurrent_gated_delta_rule_packed_decode

    def call():
        step(mixed, a, b, x["A_log"], bias, K**-0.5, pool, out, slots, False)
        return out

    return Run(call, lambda o: {"o": o, "S": pool[1:].transpose(-1, -2)}, _PACKED)


def _conv(channel_major):
    def build(item, x):
        T, D, W = (item.sizes[n] for n in "TDW")
        view = x["x"].T.contiguous() if channel_major else x["x"].T
        state = torch.zeros(1, W - 1, D, dtype=BF16).transpose(1, 2)
        cu, slots = torch.tensor([0, T], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        fresh = torch.zeros(1, dtype=torch.bool)

        def call():
            return _Z.gdn_causal_conv1d_fn(view, x["w"], None, state, cu, slots, fresh, "silu", -1)

        return Run(call, lambda y: {"y": y.T}, "channel-major input" if channel_major else "")

    return build


def _conv_update(item, x):
    B, D = item.sizes["B"], item.sizes["D"]
    state = torch.cat([torch.zeros(1, D, x["state"].shape[-1], dtype=BF16), x["state"]])
    slots = torch.arange(1, B + 1, dtype=torch.int32)

    def call():
        return _Z.gdn_causal_conv1d_update(x["x"], state, x["w"], None, "silu", slots, 0, -1)

    return Run(call, lambda y: {"y": y, "state": state[1:]}, "state stored as [B,D,3]")


def _norm_gated(item, x):
    rows, gate = x["x"].flatten(0, -2), x["z"].flatten(0, -2)

    def call():
        return _Z.gdn_rms_norm_gated(rows, x["w"], gate, 1e-6, "silu")

    return Run(call, lambda y: {"y": y.view(x["x"].shape)})


def _l2norm(item, x):
    _needs_avx512()
    return Run(lambda: _Z.gdn_l2norm_fwd(x["x"], 1e-6), lambda y: {"y": y})


def _rms_norm(item, x):
    weight = 1 + x["w"]
    return Run(lambda: _Z.zentorch_rms_norm(x["x"], weight, 1e-6), lambda y: {"y": y}, "1 + weight formed beforehand")


def _experts(item, x):
    # It packs weights where they stand, on CPUs with AVX-512: the others would read what it leaves behind.
    w13, w2 = made(x, "zentorch", lambda: [x[n].clone() for n in ("gate_up", "down")])

    def call():
        y = torch.empty_like(x["x"])
        _Z.zentorch_fused_moe(y, x["x"], w13, w2, None, None, x["weights"], x["ids"], False, "silu")
        return y

    return Run(call, lambda y: {"y": y}, "packs weights itself")


ENTRIES = {
    "prefill": {"": _prefill},
    "decode": {"": _decode},
    "conv": {"": _conv(False), "channel-major": _conv(True)},
    "conv_update": {"": _conv_update},
    "norm_gated": {"": _norm_gated},
    "l2norm": {"": _l2norm},
    "rms_norm": {"": _rms_norm},
    "experts": {"": _experts},
}

"""Samples of the backward stages of the chunked delta rule; see samples.py. Two rows of 5 tokens, one key head and
three value heads, K 8, V 6, fp32; and the packed call with bf16 data, fp32 gates and all options set."""

import torch

# The packed calls: sequences of 18, 0 and 3 tokens in three chunks of 16, two key heads, four value heads, K 8, V 6.
PACKED = {"cu_seqlens": torch.tensor([0, 18, 18, 21]), "layout": "NTD"}
HALF = torch.bfloat16


def _make(names, packed):
    """Tensors by the names that the operators give them."""
    tokens = (lambda heads: (heads, 21)) if packed else (lambda heads: (2, 5, heads))
    HK, HV, dtype = (2, 4, HALF) if packed else (1, 3, torch.float32)
    chunks = (4, 3, 8, 6) if packed else (2, 1, 3, 8, 6)

    def one(name):
        if name in ("gc", "beta"):
            return -torch.rand(tokens(HV))
        if name in ("q", "k"):
            return torch.randn(*tokens(HK), 8).to(dtype)
        if name in ("v", "do"):
            return torch.randn(*tokens(HV), 6).to(dtype)
        if name in ("h", "dh"):
            return torch.randn(chunks)
        return torch.randn(*tokens(HV), {"w": 8, "dw": 8, "A": 16, "dA": 16}.get(name, 6))

    return [one(name) for name in names.split()]


def _stage(names, **options):
    return lambda: [(_make(names, False), {}), (_make(names, True), {**PACKED, "inter_dtype": HALF, **options})]


def _dhu():
    first, (args, options) = _stage("q k w do dv gc", chunk_size=16, scale=0.3)()
    states = {"dfinal_state": torch.randn(3, 4, 6, 8), "state_v_first": True, "num_chunks": 3}
    return [first, (args, {**options, **states})]


SAMPLES = {
    "chunk_bwd_dv_local": _stage("q k do gc", chunk_size=16, scale=0.3),
    "chunk_gated_delta_rule_bwd_dhu": _dhu,
    "chunk_bwd_dqkwg": _stage("q k v_new gc h do dh dv2", chunk_size=16, scale=0.3),
    "prepare_wy_repr_bwd_da": _stage("k v beta A dw du gc"),
    "prepare_wy_repr_bwd_full": _stage("k v beta A dA dw du gc"),
    "prepare_wy_repr_bwd": _stage("k v beta A dw du gc"),
}

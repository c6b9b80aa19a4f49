"""Samples of the forward stages of the chunked delta rule; see samples.py."""

import torch
from samples_backward import PACKED
from samples_data import data as _data
from samples_data import floats as _floats


def _cumsum():
    return [
        ([_floats(2, 5, 3), 4], {}),
        ([_floats(3, 21), 16], {**PACKED, "reverse": True, "scale": 0.5, "floor": -0.7, "out_dtype": torch.float64}),
    ]


def _kkt():
    k = _data(2, 21, 8, dtype=torch.bfloat16)
    return [
        ([_data(2, 5, 1, 8), None, _data(2, 5, 3)], {}),
        ([k, _data(4, 21), _data(4, 21)], {**PACKED, "chunk_size": 16, "inter_dtype": torch.bfloat16}),
    ]


def _solve():
    return [
        ([_data(2, 5, 3, 16)], {}),
        ([_data(4, 21, 16, dtype=torch.float16)], {**PACKED, "inter_dtype": torch.float16}),
    ]


def _w_u():
    half = [_data(2, 21, 8, dtype=torch.bfloat16), _data(4, 21, 6, dtype=torch.bfloat16)]
    return [
        ([_data(2, 5, 1, 8), _data(2, 5, 3, 6), _data(2, 5, 3), _data(2, 5, 3, 16), _data(2, 5, 3)], {}),
        ([*half, _data(4, 21), _data(4, 21, 16), _data(4, 21)], {**PACKED, "inter_dtype": torch.bfloat16}),
    ]


def _fwd_h():
    k = _data(2, 21, 8, dtype=torch.bfloat16)
    options = {"chunk_size": 16, "output_final_state": True, "state_v_first": True, "num_chunks": 3}
    half = {"inter_dtype": torch.bfloat16}
    packed = [k, _data(4, 21, 8), _data(4, 21, 6), _data(4, 21), _data(3, 4, 6, 8)]
    return [
        ([_data(2, 5, 1, 8), _data(2, 5, 3, 8), _data(2, 5, 3, 6), _data(2, 5, 3)], {"output_final_state": True}),
        (packed, {**PACKED, **options, **half}),
    ]


def _fwd_o():
    half = [_data(2, 21, 8, dtype=torch.bfloat16) for _ in range(2)]
    return [
        ([_data(2, 5, 1, 8), _data(2, 5, 1, 8), _data(2, 5, 3, 6), _data(2, 1, 3, 8, 6), _data(2, 5, 3)], {}),
        ([*half, _data(4, 21, 6), _data(4, 3, 8, 6), _data(4, 21)], {**PACKED, "chunk_size": 16, "scale": 0.3}),
    ]


SAMPLES = {
    "chunk_local_cumsum": _cumsum,
    "chunk_scaled_dot_kkt": _kkt,
    "solve_tril": _solve,
    "recompute_w_u": _w_u,
    "chunk_gated_delta_rule_fwd_h": _fwd_h,
    "chunk_fwd_o": _fwd_o,
}

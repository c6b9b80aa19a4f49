"""Wrong values for the backward stages of the chunked delta rule; see bad_input_rows.py and samples_backward.py."""

import torch
from bad_input_rows import NAN, as_type, grown, ints, nested, other_type, stage_rows, strided

DV, DHU, DQKWG = "chunk_bwd_dv_local", "chunk_gated_delta_rule_bwd_dhu", "chunk_bwd_dqkwg"
WY, DA, FULL = "prepare_wy_repr_bwd", "prepare_wy_repr_bwd_da", "prepare_wy_repr_bwd_full"
VALUES = "[2, 5, 3, 6]"


def value_rows(op, *names):
    """Tensors [2, 5, 3, 6] of the first sample."""
    for name in names:
        yield op, name, grown(name, 1), ValueError, f"{name}: expected shape {VALUES}, got [2, 6, 3, 6]"


def query_rows(op):
    """Operators with q, k, do, a scale and a chunk size."""
    return [
        *stage_rows(op, "q"),
        *value_rows(op, "do"),
        *other_type(op, "k", "do", "gc"),
        (op, "k", grown("k", -1), ValueError, "k: expected shape [2, 5, 1, 8] (as q), got [2, 5, 1, 9]"),
        (op, "do", nested("do"), ValueError, "do: expected 4 dimensions, got 5"),
        (op, "gc", grown("gc", 1), ValueError, "gc: expected shape [2, 5, 3], got [2, 6, 3]"),
        (op, "scale", NAN, ValueError, "scale: expected a finite number, got nan"),
        *[
            (op, "chunk_size", size, ValueError, f"chunk_size: expected a chunk size of 16, 32, 64 or 128, got {size}")
            for size in (-64, 0, 24, 256)
        ],
    ]


def wy_rows(op):
    return [
        *stage_rows(op, "k"),
        *value_rows(op, "v", "du"),
        *other_type(op, "v", "beta", "A", "dw", "du", "gc"),
        (op, "beta", grown("beta", 2), ValueError, "beta: expected shape [2, 5, 3], got [2, 5, 4]"),
        (op, "A", grown("A", -1), ValueError, "A: expected a last size of 16, 32, 64 or 128, got 17"),
        (op, "A", grown("A", 2), ValueError, "A: expected shape [2, 5, 3, 16], got [2, 5, 4, 16]"),
        (op, "dw", grown("dw", -1), ValueError, "dw: expected shape [2, 5, 3, 8], got [2, 5, 3, 9]"),
        (op, "gc", nested("gc"), ValueError, "gc: expected shape [2, 5, 3], got [1, 2, 5, 3]"),
    ]


def output_rows(op, *names):
    for name in names:
        yield op + ".out", name, grown(name, -1), ValueError, f"{name}: expected shape"
        if name in ("dg", "dbeta"):
            yield op + ".out", name, as_type(name, torch.bfloat16), TypeError, f"{name}: expected dtype float32"
        else:
            yield op + ".out", name, strided(name), ValueError, f"{name}: expected inner stride 1, got 2"


ROWS = [
    *query_rows(DV),
    (DV, "inter_dtype", torch.float16, TypeError, "dv: expected dtype float32 or bfloat16 (as q)"),
    *output_rows(DV, "dv"),
    *query_rows(DHU),
    *value_rows(DHU, "dv"),
    *other_type(DHU, "w", "dv"),
    *[
        (DHU, argument, wrong, kind, text)
        for argument, wrong, kind, text in [
            ("w", grown("w", -1), ValueError, "w: expected shape [2, 5, 3, 8], got [2, 5, 3, 9]"),
            (
                "dfinal_state",
                grown("dfinal_state", 0),
                ValueError,
                "dfinal_state: expected 3 states (one per sequence)",
            ),
            ("dfinal_state", grown("dfinal_state", 2), ValueError, "expected shape [3, 4, 6, 8], got [3, 4, 7, 8]"),
            ("dfinal_state", as_type("dfinal_state", torch.float64), TypeError, "dfinal_state: expected dtype"),
            ("cu_seqlens", ints(0, 18, 21), ValueError, "dfinal_state: expected 2 states (one per sequence), got 3"),
            ("state_v_first", False, ValueError, "dfinal_state: expected shape [3, 4, 8, 6], got [3, 4, 6, 8]"),
            ("num_chunks", 2, ValueError, "num_chunks: expected 3 (chunks of 16 tokens), got 2"),
            ("inter_dtype", torch.float16, TypeError, "dh: expected dtype float32 or bfloat16 (as q)"),
        ]
    ],
    *output_rows(DHU, "dh", "dh0", "dv2"),
    (DHU + ".out", "dh0", as_type("dh0", torch.bfloat16), TypeError, "dh0: expected dtype float32"),
    (DHU + ".out", "dh0", grown("dh0", 0), ValueError, "dh0: expected 2 states (one per sequence), got 3"),
    *query_rows(DQKWG),
    *value_rows(DQKWG, "v_new", "dv2"),
    *other_type(DQKWG, "v_new", "h", "dh", "dv2"),
    (DQKWG, "h", grown("h", 1), ValueError, "h: expected shape [2, 1, 3, 8, 6], got [2, 2, 3, 8, 6]"),
    (DQKWG, "dh", grown("dh", 3), ValueError, "dh: expected shape [2, 1, 3, 8, 6], got [2, 1, 3, 9, 6]"),
    (DQKWG, "inter_dtype", torch.float16, TypeError, "dq: expected dtype float32 or bfloat16 (as q)"),
    *output_rows(DQKWG, "dq", "dk", "dw", "dg"),
    *wy_rows(DA),
    (DA, "inter_dtype", torch.float16, TypeError, "dA: expected dtype float32 or bfloat16 (as k)"),
    *output_rows(DA, "dA"),
    *wy_rows(FULL),
    *other_type(FULL, "dA"),
    (FULL, "dA", grown("dA", -1), ValueError, "dA: expected shape [2, 5, 3, 16], got [2, 5, 3, 17]"),
    (FULL, "inter_dtype", torch.float16, TypeError, "dk: expected dtype float32 or bfloat16 (as k)"),
    *output_rows(FULL, "dk", "dv", "dbeta", "dg"),
    *wy_rows(WY),
    (WY, "inter_dtype", torch.float64, TypeError, "dk: expected dtype float32 or bfloat16 (as k)"),
    *output_rows(WY, "dk", "dv", "dbeta", "dg"),
]

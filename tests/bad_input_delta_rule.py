"""Wrong values for the operators of the gated delta rule; see bad_input_rows.py.

Samples: two rows of 5 tokens, 1 key head and 2 value heads, K = 4, V = 3, fp32; and three sequences of 3, 0, 6 tokens,
2 key heads and 4 value heads, bf16 with fp32 gates and states, all options set."""

import torch
from bad_input_rows import NAN, as_type, grown, ints, nested, strided


def rule_rows(op):
    return [
        (op, "k", nested("k"), ValueError, "k: expected 4 dimensions, got 5"),
        (op, "k", grown("k", 1), ValueError, "expected shape [2, 6, "),
        (op, "v", nested("v"), ValueError, "v: expected 4 dimensions, got 5"),
        (op, "v", grown("v", 0), ValueError, "v: expected shape [2, 5, 2, 3], got [3, 5, 2, 3]"),
        (op, "v", as_type("v", torch.float16), TypeError, "v: expected dtype float32 (as k), got dtype float16"),
        (op, "g", grown("g", 1), ValueError, "g: expected shape [2, 5, 2], got [2, 6, 2]"),
        (op, "g", as_type("g", torch.float64), TypeError, "g: expected dtype float32, bfloat16 or float16 (as k)"),
        (op, "beta", nested("beta"), ValueError, "beta: expected shape [2, 5, 2], got [1, 2, 5, 2]"),
        (op, "beta", as_type("beta", torch.float64), TypeError, "beta: expected dtype float32, bfloat16 or float16"),
        *rule_options(op),
    ]


def rule_options(op):
    return [
        (op, "cu_seqlens", ints(1, 3, 3, 9), ValueError, "cu_seqlens[0]: expected 0, got 1"),
        (op, "cu_seqlens", ints(0, 5, 3, 9), ValueError, "cu_seqlens[2]: expected >= 5, got 3"),
        (op, "cu_seqlens", ints(0, 3, 3, 8), ValueError, "cu_seqlens[3]: expected 9 (tokens), got 8"),
        (op, "cu_seqlens", nested("cu_seqlens"), ValueError, "cu_seqlens: expected 1 dimension, got 2"),
        (op, "A_log", grown("A_log", 0), ValueError, "A_log: expected shape [4], got [5]"),
        (op, "A_log", None, ValueError, "dt_bias: expected none without A_log, got a tensor"),
        (op, "dt_bias", nested("dt_bias"), ValueError, "dt_bias: expected shape [4], got [1, 4]"),
        (op, "use_qk_l2norm", "yes", TypeError, "use_qk_l2norm: expected type bool"),
        (op, "beta_sigmoid", False, ValueError, "beta_scale: expected 1 without beta_sigmoid, got 2"),
        (op, "beta_scale", NAN, ValueError, "beta_scale: expected a finite number, got nan"),
        (op, "precision", "fp16", ValueError, "precision: expected fp32 or bf16, got fp16"),
        (op, "layout", "SBND", ValueError, "layout: expected BSND, TND, BNSD or NTD, got SBND"),
        (op, "layout", "BSND", ValueError, "k: expected 4 dimensions, got 3"),
    ]


FWD = "chunk_gated_delta_rule_fwd"
BWD = "chunk_gated_delta_rule_bwd"
POOL = "chunk_gated_delta_rule_pool"
ROWS = [
    (FWD, argument, wrong, kind, text)
    for argument, wrong, kind, text in [
        ("q", grown("q", 2), ValueError, "q: expected shape [2, 5, 1, 4], got [2, 5, 2, 4]"),
        ("q", as_type("q", torch.bfloat16), TypeError, "q: expected dtype float32 (as k), got dtype bfloat16"),
        ("k", grown("k", -1), ValueError, "q: expected shape [2, 5, 1, 5], got [2, 5, 1, 4]"),
        ("v", lambda g: torch.ones(2, 5, 0, 3), ValueError, "v: expected a multiple of 1 (key heads) heads, got 0"),
        ("initial_state", grown("initial_state", 0), ValueError, "initial_state: expected 3 states"),
        ("initial_state", grown("initial_state", 1), ValueError, "initial_state: expected shape [3, 4, 3, 4]"),
        ("initial_state", nested("initial_state"), ValueError, "initial_state: expected 4 dimensions, got 5"),
        ("initial_state", as_type("initial_state", torch.float64), TypeError, "initial_state: expected dtype float32,"),
        ("cu_seqlens", ints(0, 9), ValueError, "initial_state: expected 1 states (one per sequence of 1), got 3"),
        ("cu_seqlens", None, ValueError, "initial_state: expected 1 states (one per sequence of 1), got 3"),
        ("snapshot_at", nested("snapshot_at"), ValueError, "snapshot_at: expected rows (sequence, tokens) [M, 2]"),
        ("snapshot_at", torch.tensor([[0, 2, 1]]), ValueError, "snapshot_at: expected rows (sequence, tokens) [M, 2]"),
        ("snapshot_at", torch.tensor([[0, 2], [3, 0], [0, 0]]), ValueError, "snapshot_at[1]: expected a sequence from"),
        ("snapshot_at", torch.tensor([[0, 2], [2, 7], [0, 0]]), ValueError, "snapshot_at[1]: expected 0 to 6 tokens"),
        ("snapshot_at", torch.tensor([[0, -1], [0, 0], [0, 0]]), ValueError, "snapshot_at[0]: expected 0 to 3 tokens"),
        ("scale", NAN, ValueError, "scale: expected a finite number, got nan"),
        ("output_final_state", "yes", TypeError, "output_final_state: expected type bool"),
        ("state_v_first", False, ValueError, "initial_state: expected shape [3, 4, 4, 3], got [3, 4, 3, 4]"),
        ("layout", "NTD", ValueError, "cu_seqlens[1]: expected <= 2 (tokens), got 3"),
        ("out_layout", "BSND", ValueError, "out_layout: expected BSND or BNSD with a batched layout"),
        ("out_layout", "other", ValueError, "out_layout: expected BSND, TND, BNSD or NTD, got other"),
        ("time_segments", 0, ValueError, "time_segments: expected >= 1, got 0"),
        ("save_states", "yes", TypeError, "save_states: expected type bool"),
        ("zero_row_safe", "yes", TypeError, "zero_row_safe: expected type bool"),
    ]
] + [
    (FWD + ".out", "o", grown("o", 0), ValueError, "o: expected shape"),
    (FWD + ".out", "o", strided("o"), ValueError, "o: expected inner stride 1, got 2"),
    (FWD + ".out", "o", as_type("o", torch.float64), TypeError, "o: expected dtype"),
    (FWD + ".out", "final_state", grown("final_state", 0), ValueError, "expected 3 states"),
    (
        FWD + ".out",
        "final_state",
        as_type("final_state", torch.float16),
        TypeError,
        "final_state: expected dtype float32 or bfloat16, got float16",
    ),
    (FWD + ".out", "snapshots", grown("snapshots", 0), ValueError, "snapshots: expected 3 states"),
    (
        FWD + ".out",
        "snapshots",
        None,
        ValueError,
        "snapshots: expected a tensor (snapshot_at has 3",
    ),
    (
        FWD + ".out",
        "snapshots",
        as_type("snapshots", torch.bfloat16),
        TypeError,
        "snapshots: expected dtype float32, got dtype bfloat16",
    ),
    *rule_rows(FWD),
    *(row for row in rule_rows(BWD) if row[1] not in ("precision", "cu_seqlens")),
    (BWD, "cu_seqlens", ints(1, 3, 3, 309), ValueError, "cu_seqlens[0]: expected 0, got 1"),
    (BWD, "cu_seqlens", ints(0, 309), ValueError, "initial_state: expected 1 states (one per sequence of 1), got 3"),
    (BWD, "do", grown("do", 1), ValueError, "do: expected shape"),
    (BWD, "do", as_type("do", torch.float16), TypeError, "do: expected dtype"),
    (BWD, "dfinal_state", grown("dfinal_state", 0), ValueError, "dfinal_state: expected 3 states"),
    (BWD, "dfinal_state", as_type("dfinal_state", torch.float64), TypeError, "dfinal_state: expected dtype"),
    (BWD, "q", grown("q", 2), ValueError, "q: expected shape [2, 5, 1, 4], got [2, 5, 2, 4]"),
    (BWD, "initial_state", grown("initial_state", 1), ValueError, "initial_state: expected shape [3, 4, 3, 4]"),
    (BWD, "states", nested("states"), ValueError, "states: expected 4 dimensions, got 5"),
    (BWD, "states", as_type("states", torch.bfloat16), TypeError, "states: expected dtype float32"),
    (BWD, "scale", NAN, ValueError, "scale: expected a finite number, got nan"),
    (BWD, "state_v_first", False, ValueError, "initial_state: expected shape [3, 4, 4, 3], got [3, 4, 3, 4]"),
    (BWD, "zero_row_safe", "yes", TypeError, "zero_row_safe: expected type bool"),
    (BWD, "out_layout", "BSND", ValueError, "out_layout: expected BSND or BNSD with a batched layout"),
    (BWD, "needs", 256, ValueError, "needs: expected 0 to 255 (a bit for every result), got 256"),
    *(
        (BWD + ".out", name, grown(name, -1), ValueError, f"{name}: expected shape")
        for name in ("dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias")
    ),
    (BWD + ".out", "dq", strided("dq"), ValueError, "dq: expected inner stride 1, got 2"),
    (BWD + ".out", "dh0", as_type("dh0", torch.float16), TypeError, "dh0: expected dtype float32 or bfloat16"),
    *rule_options(POOL),
    (POOL, "q", grown("q", 1), ValueError, "q: expected shape [9, 2, 4], got [9, 3, 4]"),
    (POOL, "k", grown("k", 0), ValueError, "cu_seqlens[3]: expected 10 (tokens), got 9"),
    (POOL, "v", grown("v", 1), ValueError, "v: expected a multiple of 2 (key heads) heads, got 5"),
    (POOL, "g", grown("g", 0), ValueError, "g: expected shape [9, 4], got [10, 4]"),
    (POOL, "beta", grown("beta", 0), ValueError, "beta: expected shape [9, 4], got [10, 4]"),
    (POOL, "state", nested("state"), ValueError, "state: expected 4 dimensions, got 5"),
    (POOL, "state", grown("state", 2), ValueError, "state: expected shape [5, 4, 4, 3], got [5, 4, 5, 3]"),
    (POOL, "state", as_type("state", torch.float16), TypeError, "state: expected dtype float32 or bfloat16"),
    (POOL, "state", as_type("state", torch.float64), TypeError, "state: expected dtype float32, bfloat16 or float16"),
    (POOL, "state_indices", ints(3, -1), ValueError, "state_indices: expected 3 entries (one per sequence), got 2"),
    (POOL, "state_indices", ints().long(), ValueError, "state_indices: expected 3 entries (one per sequence), got 0"),
    (POOL, "state_indices", ints(3, -1, 5), ValueError, "state_indices[2]: expected 0 to 4 or -1 (null slot), got 5"),
    (POOL, "state_indices", ints(3, -2, 0), ValueError, "state_indices[1]: expected 0 to 4 or -1 (null slot), got -2"),
    (POOL, "state_indices", ints(3, -1, 3), ValueError, "state_indices[2]: expected a slot of its own, got 3"),
    (POOL, "has_initial_state", ints(1, 0), ValueError, "has_initial_state: expected 3 entries"),
    (POOL, "has_initial_state", ints().long(), ValueError, "has_initial_state: expected 3 entries"),
    (POOL, "null_slot", 7, ValueError, "state_indices[1]: expected 0 to 2 or 7 (null slot), got -7"),
    (POOL, "scale", NAN, ValueError, "scale: expected a finite number, got nan"),
    (POOL, "state_v_first", False, ValueError, "state: expected shape [3, 2, 4, 3], got [3, 2, 3, 4]"),
    (POOL, "out_layout", "TND", ValueError, "out_layout: expected BSND or BNSD with a batched layout"),
    (POOL + ".out", "o", grown("o", 0), ValueError, "o: expected shape"),
    (POOL + ".out", "o", strided("o"), ValueError, "o: expected inner stride 1, got 2"),
    *rule_rows("gdn_segment_map"),
    ("gdn_segment_map.out", "phi", grown("phi", 2), ValueError, "phi: expected shape [2, 2, 4, 4], got [2, 2, 5, 4]"),
    ("gdn_segment_map.out", "phi", as_type("phi", torch.bfloat16), TypeError, "phi: expected dtype float32"),
    ("gdn_segment_map.out", "s", grown("s", 0), ValueError, "s: expected 2 states (one per sequence of 2), got 3"),
    ("gdn_segment_map.out", "s", grown("s", 3), ValueError, "s: expected shape [2, 2, 4, 3], got [2, 2, 4, 4]"),
    ("gdn_segment_map.out", "s", as_type("s", torch.bfloat16), TypeError, "s: expected dtype float32"),
    ("gdn_segment_combine", "phi1", grown("phi1", 2), ValueError, "phi1: expected square matrices, got [2, 3, 5, 4]"),
    ("gdn_segment_combine", "phi1", as_type("phi1", torch.bfloat16), TypeError, "phi1: expected dtype float32 or"),
    ("gdn_segment_combine", "s1", grown("s1", 2), ValueError, "s1: expected shape [2, 3, 4, 5]"),
    ("gdn_segment_combine", "phi2", nested("phi2"), ValueError, "phi2: expected shape [2, 3, 4, 4] (as phi1)"),
    ("gdn_segment_combine", "s2", grown("s2", 3), ValueError, "s2: expected shape [2, 3, 4, 5] (as s1)"),
    ("gdn_segment_combine", "s2", as_type("s2", torch.float64), TypeError, "s2: expected dtype float32 (as phi1)"),
    ("gdn_segment_combine.out", "phi", grown("phi", 0), ValueError, "phi: expected shape [2, 3, 4, 4] (as phi1)"),
    ("gdn_segment_combine.out", "phi", strided("phi"), ValueError, "phi: expected inner stride 1, got 2"),
    ("gdn_segment_combine.out", "s", grown("s", 3), ValueError, "s: expected shape [2, 3, 4, 5] (as s1)"),
    ("gdn_segment_combine.out", "s", strided("s"), ValueError, "s: expected inner stride 1, got 2"),
]

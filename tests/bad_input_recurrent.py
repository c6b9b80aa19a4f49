"""Wrong values for the recurrence and for what is built on it; see bad_input_rows.py.

Samples: the pool's as in samples.py, three sequences of 3, 0 and 6 tokens with six slots each, 2 key heads and 4 value
heads, K = 4, V = 3; the functional form's as those of the fused operator."""

import torch
from bad_input_delta_rule import rule_options
from bad_input_rows import NAN, as_type, grown, ints, nested, strided

POOL = "recurrent_gated_delta_rule"
FWD = "recurrent_gated_delta_rule_fwd"


def slots(n, m, value):
    """The right slots with one entry changed."""

    def wrong(given):
        changed = given["state_indices"].clone()
        changed[n, m] = value
        return changed

    return wrong


def options(op):
    """Rows of the fused operator, without the argument that only it has."""
    return [row for row in rule_options(op) if row[1] != "precision"]


def decode_rows(op):
    return [
        (op, "mixed", nested("mixed"), ValueError, "mixed: expected 2 dimensions, got 3"),
        (op, "mixed", grown("mixed", 1), ValueError, "mixed: expected shape [3, 28], got [3, 29]"),
        (op, "mixed", as_type("mixed", torch.float64), TypeError, "mixed: expected dtype float32, bfloat16 or float16"),
        (op, "z", grown("z", 1), ValueError, "z: expected shape [3, 12], got [3, 13]"),
        (op, "z", None, ValueError, "z: expected a tensor, got none"),
        (op, "a", nested("a"), ValueError, "a: expected shape [3, 4], got [1, 3, 4]"),
        (op, "b", grown("b", 0), ValueError, "b: expected shape [3, 4], got [4, 4]"),
        (op, "b", None, ValueError, "b: expected a tensor, got none"),
        (op, "conv_state", grown("conv_state", 1), ValueError, "conv_state: expected 28 channels, got 29"),
        (op, "conv_state", as_type("conv_state", torch.bfloat16), TypeError, "conv_state: expected dtype float32"),
        (op, "conv_weight", grown("conv_weight", 1), ValueError, "conv_weight: expected 2 to 4 taps"),
        (op, "conv_weight", grown("conv_weight", 0), ValueError, "conv_weight: expected shape [28, 4], got [29, 4]"),
        (op, "conv_bias", grown("conv_bias", 0), ValueError, "conv_bias: expected shape [28], got [29]"),
        (op, "A_log", grown("A_log", 0), ValueError, "A_log: expected shape [4], got [5]"),
        (op, "dt_bias", nested("dt_bias"), ValueError, "dt_bias: expected shape [4], got [1, 4]"),
        (op, "state", grown("state", 3), ValueError, "state: expected shape [5, 4, 4, 3], got [5, 4, 4, 4]"),
        (op, "state", strided("state"), ValueError, "state: expected inner stride 1, got 2"),
        (op, "state", as_type("state", torch.float16), TypeError, "state: expected dtype float32 or bfloat16"),
        (op, "norm_weight", grown("norm_weight", 0), ValueError, "norm_weight: expected shape [3], got [4]"),
        (op, "state_indices", ints(4, -1, 5), ValueError, "state_indices[2]: expected 0 to 4 or -1 (null slot), got 5"),
        (op, "state_indices", ints(4, -1, 4), ValueError, "state_indices[2]: expected a slot of its own, got 4"),
        (op, "state_indices", ints(4, -1), ValueError, "state_indices: expected 3 entries (1 per sequence), got 2"),
        (op, "conv_indices", ints(3, 0), ValueError, "conv_indices: expected 3 entries (one per sequence), got 2"),
        (op, "conv_indices", ints(3, 0, 4), ValueError, "conv_indices[2]: expected 0 to 3 (sequence 2 has a state)"),
        (op, "conv_indices", ints(3, 0, 3), ValueError, "conv_indices[2]: expected a row of its own, got 3"),
        (op, "HK", 0, ValueError, "HK: expected >= 1, got 0"),
        (op, "HV", 3, ValueError, "HV: expected a multiple of 2 (HK), got 3"),
        (op, "K", 0, ValueError, "K: expected >= 1, got 0"),
        (op, "V", 4, ValueError, "mixed: expected shape [3, 32], got [3, 28]"),
        (op, "cu_seqlens", ints(0, 2, 2, 4), ValueError, "cu_seqlens[3]: expected 5 (tokens), got 4"),
        (op, "num_accepted_tokens", ints(0, 1, 1), ValueError, "num_accepted_tokens[0]: expected 1 to 3"),
        (op, "num_accepted_tokens", ints(1, 1), ValueError, "num_accepted_tokens: expected 3 entries"),
        (op, "null_slot", 7, ValueError, "state_indices[1]: expected 0 to 4 or 7 (null slot), got -1"),
        (op, "scale", NAN, ValueError, "scale: expected a finite number, got nan"),
        (op, "eps", -1.0, ValueError, "eps: expected a finite number >= 0, got -1"),
        (op, "activation", "gelu", ValueError, "activation: expected"),
        (op, "HV", 2**40, ValueError, "mixed: expected shape"),
        (op, "norm_rounding", "bf16", ValueError, "norm_rounding: expected hf or fp32"),
        (op, "projection", "kqv", ValueError, "projection: expected qkv or qkvz_ba, got kqv"),
        (op, "state_v_first", False, ValueError, "state: expected shape [7, 4, 4, 3], got [7, 4, 3, 4]"),
    ]


ROWS = [
    *options(POOL),
    *options(FWD),
    (POOL, "q", grown("q", 1), ValueError, "q: expected shape [9, 2, 4], got [9, 3, 4]"),
    (POOL, "k", grown("k", 0), ValueError, "cu_seqlens[3]: expected 10 (tokens), got 9"),
    (POOL, "v", grown("v", 1), ValueError, "v: expected a multiple of 2 (key heads) heads, got 5"),
    (POOL, "g", grown("g", 0), ValueError, "g: expected shape [9, 4], got [10, 4]"),
    (POOL, "g", None, ValueError, "g: expected a tensor with A_log, got none"),
    (POOL, "gk", grown("gk", 2), ValueError, "gk: expected shape [9, 4, 4], got [9, 4, 5]"),
    (POOL, "gk", as_type("gk", torch.float64), TypeError, "gk: expected dtype float32, bfloat16 or float16"),
    (POOL, "beta", grown("beta", 0), ValueError, "beta: expected shape [9, 4], got [10, 4]"),
    (POOL, "beta", lambda g: g["beta"][..., None], ValueError, "beta: expected shape [9, 4, 3], got [9, 4, 1]"),
    (POOL, "state", nested("state"), ValueError, "state: expected 4 dimensions, got 5"),
    (POOL, "state", grown("state", 2), ValueError, "state: expected shape [9, 4, 4, 3], got [9, 4, 5, 3]"),
    (POOL, "state", strided("state"), ValueError, "state: expected inner stride 1, got 2"),
    (POOL, "state", as_type("state", torch.float16), TypeError, "state: expected dtype float32 or bfloat16"),
    (POOL, "state", as_type("state", torch.float64), TypeError, "state: expected dtype float32, bfloat16 or float16"),
    (POOL, "state", lambda g: g["gk"].new_ones(9, 4, 1, 3).expand(9, 4, 4, 3), ValueError, "without repeated elements"),
    (
        POOL,
        "state_indices",
        nested("state_indices"),
        ValueError,
        "expected [N] or [N, M], got [1, 3, 6]",
    ),
    (POOL, "state_indices", ints(3, 0), ValueError, "state_indices: expected 3 entries (1 per sequence), got 2"),
    (POOL, "state_indices", grown("state_indices", 0), ValueError, "expected 3 rows (one per sequence), got 4"),
    (POOL, "state_indices", torch.ones(3, 0, dtype=torch.int64), ValueError, "expected at least 1 column, got 0"),
    (
        POOL,
        "state_indices",
        slots(0, 1, 9),
        ValueError,
        "[0][1]: expected 0 to 8 or -1 (null slot), got 9",
    ),
    (POOL, "state_indices", slots(2, 5, -2), ValueError, "state_indices[2][5]: expected 0 to 8 or -1 (null slot)"),
    (POOL, "state_indices", slots(2, 5, 7), ValueError, "state_indices[2][5]: expected a slot of its own, got 7"),
    (POOL, "num_accepted_tokens", ints(0, 1, 1), ValueError, "num_accepted_tokens[0]: expected 1 to 6"),
    (POOL, "num_accepted_tokens", ints(1, 1, 7), ValueError, "num_accepted_tokens[2]: expected 1 to 6"),
    (POOL, "num_accepted_tokens", ints(1, 1), ValueError, "num_accepted_tokens: expected 3 entries"),
    (POOL, "num_accepted_tokens", ints().long(), ValueError, "num_accepted_tokens: expected 3 entries"),
    (POOL, "has_initial_state", ints(1, 0), ValueError, "has_initial_state: expected 3 entries"),
    (POOL, "has_initial_state", ints().long(), ValueError, "has_initial_state: expected 3 entries"),
    (POOL, "null_slot", 7, ValueError, "state_indices[1]: expected 0 to 3 or 7 (null slot), got -7"),
    (POOL, "scale", NAN, ValueError, "scale: expected a finite number, got nan"),
    (POOL, "state_v_first", False, ValueError, "state: expected shape [4, 2, 4, 3], got [4, 2, 3, 4]"),
    (POOL + ".out", "o", grown("o", 0), ValueError, "o: expected shape"),
    (POOL + ".out", "o", strided("o"), ValueError, "o: expected inner stride 1, got 2"),
    (FWD, "q", grown("q", 2), ValueError, "q: expected shape [2, 5, 1, 4], got [2, 5, 2, 4]"),
    (FWD, "k", nested("k"), ValueError, "k: expected 4 dimensions, got 5"),
    (FWD, "v", grown("v", 0), ValueError, "v: expected shape [2, 5, 2, 3], got [3, 5, 2, 3]"),
    (FWD, "v", nested("v"), ValueError, "v: expected 4 dimensions, got 5"),
    (FWD, "g", grown("g", 1), ValueError, "g: expected shape [2, 5, 2], got [2, 6, 2]"),
    (FWD, "gk", nested("gk"), ValueError, "gk: expected shape [9, 4, 4], got [1, 9, 4, 4]"),
    (FWD, "beta", nested("beta"), ValueError, "beta: expected shape [2, 5, 2, 3], got [1, 2, 5, 2]"),
    (FWD, "initial_state", grown("initial_state", 0), ValueError, "initial_state: expected 3 states"),
    (FWD, "initial_state", grown("initial_state", 1), ValueError, "initial_state: expected shape [3, 4, 3, 4]"),
    (
        FWD,
        "initial_state",
        as_type("initial_state", torch.bfloat16),
        TypeError,
        "initial_state: expected dtype float32",
    ),
    (FWD, "initial_state", as_type("initial_state", torch.float16), TypeError, "initial_state: expected dtype float32"),
    (FWD, "cu_seqlens", None, ValueError, "initial_state: expected 9 states (one per sequence), got 3"),
    (FWD, "scale", NAN, ValueError, "scale: expected a finite number, got nan"),
    (FWD, "output_final_state", "yes", TypeError, "output_final_state: expected type bool"),
    (FWD, "state_v_first", False, ValueError, "initial_state: expected shape [3, 4, 4, 3], got [3, 4, 3, 4]"),
    (FWD + ".out", "o", grown("o", 0), ValueError, "o: expected shape"),
    (FWD + ".out", "final_state", grown("final_state", 0), ValueError, "final_state: expected 3 states"),
    *decode_rows("gdn_packed_decode"),
    ("gdn_packed_decode.out", "y", grown("y", 1), ValueError, "y: expected shape [3, 12], got [3, 13]"),
    ("gdn_packed_decode.out", "y", strided("y"), ValueError, "y: expected inner stride 1, got 2"),
]

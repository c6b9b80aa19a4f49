"""Wrong values: operator, argument, wrong value, exception, part of its text. A function gets the right arguments by
name and returns the wrong value. A row without ".out" counts for the functional and the .out form."""

import torch

NAN = float("nan")


def grown(name, dim):
    """The right tensor with one more entry in a dimension."""
    return lambda given: torch.cat([given[name], given[name].narrow(dim, 0, 1)], dim)


def nested(name):
    """The right tensor with one more dimension."""
    return lambda given: given[name][None]


def strided(name):
    """The right tensor with an inner stride of 2."""
    return lambda given: given[name].repeat_interleave(2, -1)[..., ::2]


def as_type(name, dtype):
    return lambda given: given[name].to(dtype)


def ints(*values):
    return torch.tensor(values)


def conv_rows(op):
    return [
        (op, "x", nested("x"), ValueError, "x: expected 3 dimensions, got 4"),
        (op, "x", grown("x", -1), ValueError, "expected shape"),
        (op, "weight", grown("weight", 0), ValueError, "weight: expected shape [8, 4], got [9, 4]"),
        (op, "weight", lambda g: torch.ones(8, 5), ValueError, "weight: expected 2 to 4 taps"),
        (op, "weight", lambda g: torch.ones(8, 1), ValueError, "weight: expected 2 to 4 taps"),
        (op, "weight", nested("weight"), ValueError, "weight: expected 2 dimensions, got 3"),
        (op, "bias", grown("bias", 0), ValueError, "bias: expected shape [8], got [9]"),
        (op, "initial_state", grown("initial_state", 0), ValueError, "initial_state: expected 3 states"),
        (op, "initial_state", grown("initial_state", 1), ValueError, "initial_state: expected 8 channels, got 9"),
        (op, "initial_state", lambda g: torch.ones(3, 8, 2), ValueError, "expected state length >= 3, got 2"),
        (op, "initial_state", as_type("initial_state", torch.bfloat16), TypeError, "initial_state: expected dtype"),
        (op, "cu_seqlens", ints(1, 3, 3, 9), ValueError, "cu_seqlens[0]: expected 0, got 1"),
        (op, "cu_seqlens", ints(0, 5, 3, 9), ValueError, "cu_seqlens[2]: expected >= 5, got 3"),
        (op, "cu_seqlens", ints(0, 3, 20, 9), ValueError, "cu_seqlens[2]: expected <= 9 (tokens), got 20"),
        (op, "cu_seqlens", ints(0, 3, 3, 8), ValueError, "cu_seqlens[3]: expected 9 (tokens), got 8"),
        (op, "cu_seqlens", ints(0, 2**62, -(2**62), 9), ValueError, "cu_seqlens[1]: expected <= 9"),
        (op, "cu_seqlens", ints(0, 9), ValueError, "expected 1 states (one per sequence), got 3"),
        (op, "cu_seqlens", nested("cu_seqlens"), ValueError, "cu_seqlens: expected 1 dimension, got 2"),
        (op, "activation", "gelu", ValueError, "activation: expected"),
        (op, "activation", "sigmoid", ValueError, "activation: expected None, silu or swish, got sigmoid"),
        (op, "head_num", 3, ValueError, "head_num: expected 0 or a divisor of 8 channels, got 3"),
        (op, "head_num", -2, ValueError, "head_num: expected 0 or a divisor"),
        (op, "layout", "SBND", ValueError, "layout: expected BSND, TND, BNSD or NTD, got SBND"),
        (op, "layout", "TND", ValueError, "x: expected 2 dimensions"),
    ]


CONV = [
    *conv_rows("causal_conv1d_fwd"),
    *conv_rows("causal_conv1d_bwd"),
    ("causal_conv1d_fwd", "state_len", -1, ValueError, "state_len: expected >= 0, got -1"),
    ("causal_conv1d_fwd", "output_final_state", "yes", TypeError, "output_final_state: expected type bool"),
    ("causal_conv1d_fwd.out", "y", grown("y", -1), ValueError, "y: expected shape"),
    ("causal_conv1d_fwd.out", "y", strided("y"), ValueError, "y: expected inner stride 1, got 2"),
    ("causal_conv1d_fwd.out", "final_state", grown("final_state", 0), ValueError, "final_state: expected 3 states"),
    ("causal_conv1d_fwd.out", "final_state", lambda g: torch.ones(3, 8, 2), ValueError, "expected state length >= 3"),
    ("causal_conv1d_bwd", "dy", grown("dy", 0), ValueError, "dy: expected shape"),
    ("causal_conv1d_bwd", "dy", as_type("dy", torch.bfloat16), TypeError, "dy: expected dtype float32"),
    ("causal_conv1d_bwd", "dfinal_state", grown("dfinal_state", 0), ValueError, "dfinal_state: expected 3 states"),
    ("causal_conv1d_bwd.out", "dx", grown("dx", -1), ValueError, "dx: expected shape"),
    ("causal_conv1d_bwd.out", "dx", strided("dx"), ValueError, "dx: expected inner stride 1, got 2"),
    ("causal_conv1d_bwd.out", "dweight", grown("dweight", 1), ValueError, "dweight: expected shape [8, 4]"),
    ("causal_conv1d_bwd.out", "dweight", as_type("dweight", torch.bfloat16), TypeError, "dweight: expected dtype"),
    ("causal_conv1d_bwd.out", "dbias", nested("dbias"), ValueError, "dbias: expected shape [8], got [1, 8]"),
    ("causal_conv1d_bwd.out", "dinitial_state", grown("dinitial_state", 2), ValueError, "dinitial_state: expected"),
]

# Samples: three sequences of 2, 0 and 4 tokens in a pool of four rows; two rows of 3 tokens with cache_seqlens.
UPDATE = [
    ("causal_conv1d_update", argument, wrong, kind, text)
    for argument, wrong, kind, text in [
        ("x", nested("x"), ValueError, "x: expected 2 dimensions, got 3"),
        ("x", as_type("x", torch.float64), TypeError, "expected dtype float32, bfloat16 or float16"),
        ("conv_state", nested("conv_state"), ValueError, "conv_state: expected 3 dimensions, got 4"),
        ("conv_state", grown("conv_state", 1), ValueError, "conv_state: expected 8 channels, got 9"),
        ("conv_state", lambda g: torch.ones(4, 8, 2), ValueError, "conv_state: expected state length >= 3, got 2"),
        ("conv_state", as_type("conv_state", torch.float16), TypeError, "conv_state: expected dtype float32 (as x)"),
        ("weight", grown("weight", 1), ValueError, "weight: expected 2 to 4 taps"),
        ("bias", grown("bias", 0), ValueError, "bias: expected shape [8], got [9]"),
        ("cu_seqlens", ints(0, 4, 2, 6), ValueError, "cu_seqlens[2]: expected >= 4, got 2"),
        ("cu_seqlens", ints(0, 2, 2, 2, 6), ValueError, "cache_indices: expected 4 entries (one per sequence), got 3"),
        ("cache_indices", ints(3, -2, 0), ValueError, "cache_indices[1]: expected -1 or 0 to 3, got -2"),
        ("cache_indices", ints(3, -1, 4), ValueError, "cache_indices[2]: expected -1 or 0 to 3, got 4"),
        ("cache_indices", ints(3, -1, 3), ValueError, "cache_indices[2]: expected a row of its own, got 3 as in [0]"),
        ("cache_indices", ints(3, -1), ValueError, "cache_indices: expected 3 entries (one per sequence), got 2"),
        ("cache_indices", ints().long(), ValueError, "cache_indices: expected 3 entries (one per sequence), got 0"),
        ("has_initial_state", ints(1, 0), ValueError, "has_initial_state: expected 3 entries"),
        ("num_accepted_tokens", ints(0, 2, 1), ValueError, "num_accepted_tokens[0]: expected 1 to 4"),
        ("num_accepted_tokens", ints(1, 2, 5), ValueError, "num_accepted_tokens[2]: expected 1 to 4"),
        ("num_accepted_tokens", ints(1), ValueError, "num_accepted_tokens: expected 3 entries"),
        ("cache_seqlens", ints(4, -1), ValueError, "cache_seqlens[1]: expected >= 0, got -1"),
        ("cache_seqlens", ints(4), ValueError, "cache_seqlens: expected 2 entries"),
        ("pad_slot_id", 7, ValueError, "cache_indices[1]: expected 7 or 0 to 3, got -1"),
        ("state_anchor", "middle", ValueError, "state_anchor: expected tail or head, got middle"),
        ("activation", "sigmoid", ValueError, "activation: expected None, silu or swish, got sigmoid"),
        ("head_num", 3, ValueError, "head_num: expected 0 or a divisor of 8 channels, got 3"),
        ("layout", "NTD", ValueError, "expected"),
        ("layout", "SBND", ValueError, "layout: expected BSND, TND, BNSD or NTD, got SBND"),
    ]
] + [
    ("causal_conv1d_update.out", "y", grown("y", 0), ValueError, "y: expected shape"),
    ("causal_conv1d_update.out", "y", strided("y"), ValueError, "y: expected inner stride 1, got 2"),
]


def gating_rows(op):
    return [
        (op, "a", nested("a"), ValueError, "a: expected 3 dimensions, got 4"),
        (op, "b", grown("b", 1), ValueError, "b: expected shape [2, 5, 3] (as a), got [2, 6, 3]"),
        (op, "b", as_type("b", torch.bfloat16), TypeError, "b: expected dtype float32 (as a), got dtype bfloat16"),
        (op, "A_log", grown("A_log", 0), ValueError, "A_log: expected shape [3], got [4]"),
        (op, "dt_bias", grown("dt_bias", 0), ValueError, "dt_bias: expected shape [5], got [6]"),
        (op, "beta_scale", NAN, ValueError, "beta_scale: expected a finite number, got nan"),
        (op, "layout", "NTD", ValueError, "a: expected 2 dimensions, got 3"),
        (op, "layout", "other", ValueError, "layout: expected BSND, TND, BNSD or NTD, got other"),
    ]


GATING = [
    *gating_rows("gdn_gating_fwd"),
    *gating_rows("gdn_gating_bwd"),
    ("gdn_gating_fwd", "beta_dtype", torch.int32, TypeError, "beta: expected dtype"),
    ("gdn_gating_fwd.out", "g", as_type("g", torch.bfloat16), TypeError, "g: expected dtype float32"),
    ("gdn_gating_fwd.out", "g", grown("g", 1), ValueError, "g: expected shape"),
    ("gdn_gating_fwd.out", "beta", strided("beta"), ValueError, "beta: expected inner stride 1, got 2"),
    ("gdn_gating_bwd", "dg", grown("dg", 1), ValueError, "dg: expected shape"),
    ("gdn_gating_bwd", "dg", as_type("dg", torch.bfloat16), TypeError, "dg: expected dtype float32"),
    ("gdn_gating_bwd", "dbeta", nested("dbeta"), ValueError, "dbeta: expected shape"),
    ("gdn_gating_bwd.out", "da", grown("da", 0), ValueError, "da: expected shape"),
    ("gdn_gating_bwd.out", "db", strided("db"), ValueError, "db: expected inner stride 1, got 2"),
    ("gdn_gating_bwd.out", "dA_log", grown("dA_log", 0), ValueError, "dA_log: expected shape [3], got [4]"),
    ("gdn_gating_bwd.out", "ddt_bias", nested("ddt_bias"), ValueError, "ddt_bias: expected shape [5], got [1, 5]"),
]


def row_outputs(op, *names):
    for name in names:
        yield op + ".out", name, grown(name, -1), ValueError, f"{name}: expected shape"
        if name in ("y", "dx", "dz"):
            yield op + ".out", name, strided(name), ValueError, f"{name}: expected inner stride 1, got 2"


def backward_inputs(op):
    return [
        (op, "dy", grown("dy", -1), ValueError, "dy: expected shape"),
        (op, "x", lambda g: torch.tensor(1.0), ValueError, "x: expected at least 1 dimension, got 0"),
        (op, "rstd", nested("rstd"), ValueError, "rstd: expected shape [2, 3]"),
        (op, "rstd", as_type("rstd", torch.bfloat16), TypeError, "rstd: expected dtype float32"),
    ]


EPS = [
    (op, "eps", value, ValueError, "eps: expected a finite number >= 0, got")
    for op in ("l2norm_fwd", "rms_norm_gated_fwd", "rms_norm_fwd")
    for value in (-1.0, NAN, float("inf"))
]
GATED = [
    (op, argument, wrong, ValueError, text)
    for op in ("rms_norm_gated_fwd", "rms_norm_gated_bwd")
    for argument, wrong, text in [
        ("z", grown("z", 0), "z: expected shape [2, 3, 8] (as x), got [3, 3, 8]"),
        ("weight", grown("weight", 0), "weight: expected shape [8], got [9]"),
        ("activation", "relu", "activation: expected"),
        ("activation", "", "activation: expected silu, swish or sigmoid, got None"),
        ("rounding", "bf16", "rounding: expected hf or fp32, got bf16"),
    ]
]
SWIGLU = [
    row
    for op in ("swiglu_fwd", "swiglu_bwd")
    for row in [
        (op, "gate", lambda g: torch.tensor(1.0), ValueError, "gate: expected at least 1 dimension, got 0"),
        (op, "gate", as_type("gate", torch.int32), TypeError, "gate: expected dtype"),
        (op, "up", grown("up", -1), ValueError, "up: expected shape [2, 3, 8] (as gate), got [2, 3, 9]"),
        (op, "up", as_type("up", torch.float16), TypeError, "up: expected dtype float32 (as gate)"),
    ]
]
NORM = [
    *EPS,
    *GATED,
    ("l2norm_fwd", "x", lambda g: torch.tensor(1.0), ValueError, "x: expected at least 1 dimension, got 0"),
    ("l2norm_fwd", "out_dtype", torch.int32, TypeError, "y: expected dtype"),
    ("l2norm_fwd", "out_dtype", torch.float64, TypeError, "y: expected dtype"),
    *backward_inputs("l2norm_bwd"),
    ("l2norm_bwd", "zero_row_safe", "yes", TypeError, "zero_row_safe: expected type bool"),
    ("rms_norm_gated_fwd", "x", grown("x", -1), ValueError, "z: expected shape"),
    ("rms_norm_gated_fwd", "out_memory", "other", ValueError, "out_memory: expected same or swapped, got other"),
    *backward_inputs("rms_norm_gated_bwd"),
    ("rms_norm_fwd", "x", grown("x", -1), ValueError, "weight: expected shape [9], got [8]"),
    ("rms_norm_fwd", "weight", nested("weight"), ValueError, "weight: expected shape [8], got [1, 8]"),
    *backward_inputs("rms_norm_bwd"),
    ("rms_norm_bwd", "weight", grown("weight", 0), ValueError, "weight: expected shape [8], got [9]"),
    *SWIGLU,
    ("swiglu_bwd", "dy", grown("dy", 0), ValueError, "dy: expected shape [2, 3, 8] (as gate), got [3, 3, 8]"),
    *row_outputs("swiglu_fwd", "y"),
    *row_outputs("swiglu_bwd", "dgate", "dup"),
    *row_outputs("l2norm_fwd", "y", "rstd"),
    *row_outputs("l2norm_bwd", "dx"),
    *row_outputs("rms_norm_gated_fwd", "y", "rstd"),
    *row_outputs("rms_norm_gated_bwd", "dx", "dz", "dweight"),
    *row_outputs("rms_norm_fwd", "y", "rstd"),
    *row_outputs("rms_norm_bwd", "dx", "dweight"),
]


def rope_rows(op, x):
    return [
        (op, x, nested(x), ValueError, f"{x}: expected 4 dimensions, got 5"),
        (op, x, as_type(x, torch.bfloat16), TypeError, f"expected dtype bfloat16 (as {x}), got dtype float32"),
        (op, "cos", grown("cos", 1), ValueError, "cos: expected shape [2, 5, 4], got [2, 6, 4]"),
        (op, "cos", grown("cos", -1), ValueError, "cos: expected an even R from 2 to 8, got 5"),
        (op, "cos", lambda g: torch.ones(2, 5, 10), ValueError, "cos: expected an even R from 2 to 8, got 10"),
        (op, "cos", nested("cos"), ValueError, "cos: expected [T, R] or [B, T, R], got [1, 2, 5, 4]"),
        (op, "sin", grown("sin", 0), ValueError, "sin: expected shape [2, 5, 4] (as cos), got [3, 5, 4]"),
        (op, "sin", as_type("sin", torch.bfloat16), TypeError, "sin: expected dtype float32 (as cos)"),
        (op, "layout", "NTD", ValueError, "cos: expected shape [3, 4], got [5, 4]"),
        (op, "layout", "BSND", ValueError, f"{x}: expected 4 dimensions, got 3"),
        (op, "layout", "other", ValueError, "layout: expected BSND, TND, BNSD or NTD, got other"),
        (op, "rounding", "bf16", ValueError, "rounding: expected hf or fp32, got bf16"),
    ]


ROPE = [
    *rope_rows("partial_rope_fwd", "x"),
    *rope_rows("partial_rope_bwd", "dy"),
    *row_outputs("partial_rope_fwd", "y"),
    *row_outputs("partial_rope_bwd", "dx"),
    ("mrope_cos_sin", "position_ids", ints(1, 2), ValueError, "position_ids: expected [B, T] or [3, B, T]"),
    ("mrope_cos_sin", "position_ids", grown("position_ids", 0), ValueError, "position_ids: expected"),
    ("mrope_cos_sin", "inv_freq", nested("inv_freq"), ValueError, "inv_freq [R/2], got"),
    ("mrope_cos_sin", "inv_freq", as_type("inv_freq", torch.bfloat16), TypeError, "inv_freq: expected dtype float32"),
    ("mrope_cos_sin", "section", [2, 1], ValueError, "section: expected 3 entries, got 2"),
    ("mrope_cos_sin", "section", [2, -1, 1], ValueError, "section[1]: expected >= 0, got -1"),
    ("mrope_cos_sin", "scaling", "1", TypeError, "scaling: expected type float"),
    ("mrope_cos_sin", "dtype", torch.int32, TypeError, "cos: expected dtype"),
]
SEQLENS = [
    ("seqlens", "cu_seqlens", ints(0, 4, 2, 5), ValueError, "cu_seqlens[2]: expected >= 4, got 2"),
    ("seqlens", "cu_seqlens", nested("cu_seqlens"), ValueError, "cu_seqlens: expected 1 dimension, got 2"),
    ("seqlens", "seq_idx", ints(0, 0, 1, 1, 0), ValueError, "seq_idx[4]: expected an id not used before, got 0"),
    ("seqlens", "seq_idx", torch.zeros(2, 5, dtype=torch.int64), ValueError, "seq_idx: expected [T] or [1, T]"),
    ("seqlens", "position_ids", ints(0, 1, 0, 1, 7), ValueError, "position_ids[4]: expected 2 (same sequence) or 0"),
    ("seqlens", "position_ids", ints(0, 1, 0, 1, -1), ValueError, "position_ids[4]: expected >= 0, got -1"),
    ("seqlens", "position_ids", torch.zeros(3, 2, 5, dtype=torch.int64), ValueError, "expected one row [3, 1, T]"),
    ("seqlens", "position_ids", torch.zeros(2, 1, 5, dtype=torch.int64), ValueError, "expected [T] or [1, T]"),
    ("seqlens", "tokens", -1, ValueError, "tokens: expected >= 0, got -1"),
    ("seqlens", "tokens", 6, ValueError, "cu_seqlens[3]: expected 6 (tokens), got 5"),
]


def stage_rows(op, first, tokens=21, dimensions=3):
    """What the stages of the chunked delta rule share; the second sample is packed and head-major."""
    return [
        (op, "cu_seqlens", ints(1, 18, 18, tokens), ValueError, "cu_seqlens[0]: expected 0, got 1"),
        (op, "cu_seqlens", ints(0, 18, 12, tokens), ValueError, "cu_seqlens[2]: expected >= 18, got 12"),
        (op, "cu_seqlens", ints(0, 18, 18, 20), ValueError, "cu_seqlens[3]: expected 21 (tokens), got 20"),
        (op, "layout", "SBND", ValueError, "layout: expected BSND, TND, BNSD or NTD, got SBND"),
        (op, "layout", "BNSD", ValueError, f"{first}: expected {dimensions + 1} dimensions, got {dimensions}"),
        (op, first, nested(first), ValueError, f"{first}: expected {dimensions + 1} dimensions, got {dimensions + 2}"),
    ]


def other_type(op, *names):
    """Neither fp32 nor the data type of the first sample, which is fp32 too."""
    return [(op, n, as_type(n, torch.float16), TypeError, f"{n}: expected dtype float32") for n in names]


CHUNK_SIZES = [
    (op, "chunk_size", size, ValueError, f"chunk_size: expected a chunk size of 16, 32, 64 or 128, got {size}")
    for op in ("chunk_scaled_dot_kkt", "chunk_gated_delta_rule_fwd_h", "chunk_fwd_o")
    for size in (-64, 0, 24, 256)
]
STAGES = [
    *CHUNK_SIZES,
    *stage_rows("chunk_local_cumsum", "g", dimensions=2),
    ("chunk_local_cumsum", "chunk_size", 12, ValueError, "chunk_size: expected a power of two, got 12"),
    ("chunk_local_cumsum", "chunk_size", 0, ValueError, "chunk_size: expected a power of two, got 0"),
    ("chunk_local_cumsum", "reverse", "yes", TypeError, "reverse: expected type bool"),
    ("chunk_local_cumsum", "scale", NAN, ValueError, "scale: expected a finite number, got nan"),
    ("chunk_local_cumsum", "floor", NAN, ValueError, "floor: expected a finite number or none, got nan"),
    ("chunk_local_cumsum", "out_dtype", torch.bfloat16, TypeError, "out: expected dtype float32 or float64"),
    ("chunk_local_cumsum.out", "out", grown("out", 1), ValueError, "out: expected shape [2, 5, 3] (as g)"),
    *stage_rows("chunk_scaled_dot_kkt", "k"),
    *other_type("chunk_scaled_dot_kkt", "beta"),
    ("chunk_scaled_dot_kkt", "gc", grown("gc", 0), ValueError, "gc: expected shape [4, 21], got [5, 21]"),
    ("chunk_scaled_dot_kkt", "gc", as_type("gc", torch.bfloat16), TypeError, "gc: expected dtype float32"),
    ("chunk_scaled_dot_kkt", "beta", grown("beta", 1), ValueError, "beta: expected shape [2, 5, 3], got [2, 6, 3]"),
    ("chunk_scaled_dot_kkt", "beta", nested("beta"), ValueError, "beta: expected 3 dimensions, got 4"),
    ("chunk_scaled_dot_kkt", "inter_dtype", torch.float16, TypeError, "A0: expected dtype float32 or bfloat16 (as k)"),
    ("chunk_scaled_dot_kkt.out", "A0", grown("A0", -1), ValueError, "A0: expected shape [2, 5, 3, 64]"),
    ("chunk_scaled_dot_kkt.out", "A0", strided("A0"), ValueError, "A0: expected inner stride 1, got 2"),
    *stage_rows("solve_tril", "A0"),
    ("solve_tril", "A0", grown("A0", -1), ValueError, "A0: expected a last size of 16, 32, 64 or 128, got 17"),
    ("solve_tril", "inter_dtype", torch.float64, TypeError, "A: expected dtype float32, bfloat16 or float16 (as A0)"),
    ("solve_tril.out", "A", grown("A", 1), ValueError, "A: expected shape [2, 5, 3, 16], got [2, 6, 3, 16]"),
    ("solve_tril.out", "A", strided("A"), ValueError, "A: expected inner stride 1, got 2"),
    *stage_rows("recompute_w_u", "k"),
    *other_type("recompute_w_u", "v", "beta", "A", "gc"),
    ("recompute_w_u", "v", grown("v", 1), ValueError, "v: expected shape [2, 5, 3, 6], got [2, 6, 3, 6]"),
    ("recompute_w_u", "beta", grown("beta", 2), ValueError, "beta: expected shape [2, 5, 3], got [2, 5, 4]"),
    ("recompute_w_u", "A", grown("A", -1), ValueError, "A: expected a last size of 16, 32, 64 or 128, got 17"),
    ("recompute_w_u", "A", grown("A", 2), ValueError, "A: expected shape [2, 5, 3, 16], got [2, 5, 4, 16]"),
    ("recompute_w_u", "gc", nested("gc"), ValueError, "gc: expected shape [2, 5, 3], got [1, 2, 5, 3]"),
    ("recompute_w_u", "inter_dtype", torch.float64, TypeError, "w: expected dtype float32 or bfloat16 (as k)"),
    ("recompute_w_u.out", "w", grown("w", -1), ValueError, "w: expected shape [2, 5, 3, 8], got [2, 5, 3, 9]"),
    ("recompute_w_u.out", "u", strided("u"), ValueError, "u: expected inner stride 1, got 2"),
    *stage_rows("chunk_gated_delta_rule_fwd_h", "k"),
    *other_type("chunk_gated_delta_rule_fwd_h", "w", "u", "gc"),
    *[
        ("chunk_gated_delta_rule_fwd_h", argument, wrong, kind, text)
        for argument, wrong, kind, text in [
            ("w", grown("w", -1), ValueError, "w: expected shape [2, 5, 3, 8], got [2, 5, 3, 9]"),
            ("u", grown("u", 1), ValueError, "u: expected shape [2, 5, 3, 6], got [2, 6, 3, 6]"),
            ("u", nested("u"), ValueError, "u: expected 4 dimensions, got 5"),
            ("gc", grown("gc", 1), ValueError, "gc: expected shape [2, 5, 3], got [2, 6, 3]"),
            ("initial_state", grown("initial_state", 0), ValueError, "initial_state: expected 3 states (one per"),
            ("initial_state", grown("initial_state", 2), ValueError, "expected shape [3, 4, 6, 8], got [3, 4, 7, 8]"),
            ("initial_state", as_type("initial_state", torch.float64), TypeError, "initial_state: expected dtype"),
            ("cu_seqlens", ints(0, 18, 21), ValueError, "initial_state: expected 2 states (one per sequence), got 3"),
            ("output_final_state", "yes", TypeError, "output_final_state: expected type bool"),
            ("num_chunks", 2, ValueError, "num_chunks: expected 3 (chunks of 16 tokens), got 2"),
            ("inter_dtype", torch.float16, TypeError, "h: expected dtype float32 or bfloat16 (as k)"),
        ]
    ],
    ("chunk_gated_delta_rule_fwd_h", "state_v_first", "yes", TypeError, "state_v_first: expected type bool"),
    ("chunk_gated_delta_rule_fwd_h.out", "h", grown("h", 1), ValueError, "h: expected shape [2, 1, 3, 8, 6]"),
    ("chunk_gated_delta_rule_fwd_h.out", "h", strided("h"), ValueError, "h: expected inner stride 1, got 2"),
    ("chunk_gated_delta_rule_fwd_h.out", "v_new", grown("v_new", -1), ValueError, "v_new: expected shape"),
    (
        "chunk_gated_delta_rule_fwd_h.out",
        "final_state",
        grown("final_state", 0),
        ValueError,
        "final_state: expected 2 states (one per sequence), got 3",
    ),
    *stage_rows("chunk_fwd_o", "q"),
    *other_type("chunk_fwd_o", "k", "v_new", "h", "gc"),
    ("chunk_fwd_o", "k", grown("k", -1), ValueError, "k: expected shape [2, 5, 1, 8] (as q), got [2, 5, 1, 9]"),
    ("chunk_fwd_o", "v_new", grown("v_new", 1), ValueError, "v_new: expected shape [2, 5, 3, 6], got [2, 6, 3, 6]"),
    ("chunk_fwd_o", "h", grown("h", 1), ValueError, "h: expected shape [2, 1, 3, 8, 6], got [2, 2, 3, 8, 6]"),
    ("chunk_fwd_o", "gc", grown("gc", 1), ValueError, "gc: expected shape [2, 5, 3], got [2, 6, 3]"),
    ("chunk_fwd_o", "scale", float("inf"), ValueError, "scale: expected a finite number, got inf"),
    ("chunk_fwd_o.out", "o", grown("o", -1), ValueError, "o: expected shape [2, 5, 3, 6], got [2, 5, 3, 7]"),
    ("chunk_fwd_o.out", "o", strided("o"), ValueError, "o: expected inner stride 1, got 2"),
]
ROWS = CONV + UPDATE + GATING + NORM + ROPE + SEQLENS + STAGES

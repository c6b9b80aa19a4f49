"""Wrong values for the operators of the experts, see bad_input_rows.py."""

import torch
from bad_input_rows import as_type, grown, nested

NAN = float("nan")
HALF = torch.bfloat16


def changed(name, index, value):
    """The right tensor with one other entry."""

    def wrong(given):
        t = given[name].clone()
        t[index] = value
        return t

    return wrong


def sizes(op, *names):
    """One more row, and one more dimension."""
    return [
        row
        for name in names
        for row in (
            (op, name, grown(name, 0), ValueError, "expected shape"),
            (op, name, nested(name), ValueError, f"{name}: expected"),
        )
    ]


def outputs(op, *names):
    return [
        row
        for name in names
        for row in (
            (op + ".out", name, grown(name, 0), ValueError, f"{name}: expected"),
            (op + ".out", name, nested(name), ValueError, f"{name}: expected"),
        )
    ]


def route(op):
    return [
        (op, "logits", nested("logits"), ValueError, "logits: expected 2 dimensions, got 3"),
        (op, "renormalise", "yes", TypeError, "renormalise: expected type bool"),
        (op, "logits_rounding", torch.int32, TypeError, "logits_rounding: expected dtype"),
    ]


ROUTE = [
    *route("moe_route_fwd"),
    ("moe_route_fwd", "logits", changed("logits", (1, 3), NAN), ValueError, "logits[1]: expected numbers below +inf"),
    ("moe_route_fwd", "logits", changed("logits", (2, 0), float("inf")), ValueError, "logits[2]: expected numbers"),
    (
        "moe_route_fwd",
        "logits",
        changed("logits", 0, -float("inf")),
        ValueError,
        "logits[0]: expected at least 2 above",
    ),
    (
        "moe_route_fwd",
        "replay_ids",
        changed("replay_ids", (1, 1), 8),
        ValueError,
        "replay_ids[1,1]: expected -1 or 0..7",
    ),
    (
        "moe_route_fwd",
        "replay_ids",
        changed("replay_ids", (0, 0), -2),
        ValueError,
        "replay_ids[0,0]: expected -1 or 0..7",
    ),
    (
        "moe_route_fwd",
        "replay_ids",
        grown("replay_ids", 0),
        ValueError,
        "replay_ids: expected shape [3, 2], got [4, 2]",
    ),
    ("moe_route_fwd", "top_k", 0, ValueError, "top_k: expected 1 to 8 (experts), got 0"),
    ("moe_route_fwd", "top_k", 2**40, ValueError, "top_k: expected 1 to 8 (experts), got 1099511627776"),
    ("moe_route_fwd", "top_k", 9, ValueError, "top_k: expected 1 to 8 (experts), got 9"),
    ("moe_route_fwd", "weights_dtype", torch.float16, TypeError, "weights: expected dtype"),
    ("moe_route_fwd", "output_probs", "yes", TypeError, "output_probs: expected type bool"),
    *outputs("moe_route_fwd", "ids", "weights", "probs"),
    *route("moe_route_bwd"),
    ("moe_route_bwd", "logits", grown("logits", 0), ValueError, "expected shape"),
    *sizes("moe_route_bwd", "dweights", "dprobs"),
    ("moe_route_bwd", "ids", grown("ids", 0), ValueError, "expected shape"),
    ("moe_route_bwd", "ids", changed("ids", (2, 1), 8), ValueError, "ids[2,1]: expected -1 or 0..7, got 8"),
    *outputs("moe_route_bwd", "dlogits"),
]

ROUTING = [
    ("moe_init_routing", "ids", nested("ids"), ValueError, "ids: expected 2 dimensions, got 3"),
    ("moe_init_routing", "ids", changed("ids", (1, 0), 4), ValueError, "ids[1,0]: expected -1 or 0..3, got 4"),
    ("moe_init_routing", "ids", changed("ids", (1, 0), -2), ValueError, "ids[1,0]: expected -1 or 0..3, got -2"),
    ("moe_init_routing", "num_experts", -1, ValueError, "num_experts: expected at least 0, got -1"),
    ("moe_init_routing", "num_experts", 2, ValueError, "ids[0,0]: expected -1 or 0..1, got 2"),
    ("moe_init_routing", "ids_convention", "other", ValueError, "ids_convention: expected plain or transformers_ep"),
    ("moe_init_routing.out", "counts", nested("counts"), ValueError, "counts: expected 1 dimensions, got 2"),
    *outputs("moe_init_routing", "src", "pos"),
    ("moe_permute", "x", nested("x"), ValueError, "x: expected 2 dimensions, got 3"),
    ("moe_permute", "src", nested("src"), ValueError, "src: expected 1 dimensions, got 2"),
    ("moe_permute", "src", changed("src", 0, 6), ValueError, "src[0]: expected -1 or 0..5, got 6"),
    ("moe_permute", "pos", nested("pos"), ValueError, "pos: expected 2 dimensions, got 3"),
    ("moe_permute", "pos", grown("pos", 0), ValueError, "pos: expected"),
    *outputs("moe_permute", "y"),
    *[
        row
        for op in ("moe_unpermute_fwd", "moe_unpermute_bwd")
        for row in (
            (op, "y", nested("y"), ValueError, "y: expected 2 dimensions, got 3"),
            (op, "pos", nested("pos"), ValueError, "pos: expected 2 dimensions, got 3"),
            (op, "pos", changed("pos", (0, 0), 6), ValueError, "pos[0,0]: expected -1 or 0..5, got 6"),
            (op, "weights", grown("weights", 0), ValueError, "weights: expected shape [3, 2], got [4, 2]"),
        )
    ],
    ("moe_unpermute_bwd", "pos", changed("pos", (0, 0), 4), ValueError, "pos[2,1]: expected a place of its own, got 4"),
    *sizes("moe_unpermute_bwd", "dout"),
    *outputs("moe_unpermute_fwd", "out"),
    *outputs("moe_unpermute_bwd", "dy", "dweights"),
]


def matmul(op):
    return [
        (op, "x", nested("x"), ValueError, "x: expected"),
        (op, "weight", grown("weight", 2), ValueError, "expected shape"),
        (
            op,
            "weight",
            lambda g: g["weight"].repeat(1, 2, 2)[:, ::2, ::2],
            ValueError,
            "weight: expected stride 1 in one",
        ),
        (op, "groups", changed("groups", 0, -1), ValueError, "groups[0]: expected >= 0, got -1"),
        (op, "groups", changed("groups", 2, 8), ValueError, "groups[2]: expected <= 3 (of 5 rows), got 8"),
        (op, "groups", grown("groups", 0), ValueError, "expected shape"),
        (op, "weight_axes", "nk", ValueError, "expected shape"),
        (op, "weight_axes", "other", ValueError, "weight_axes: expected nk or kn, got other"),
        (op, "group_list", "counts", ValueError, "groups[2]: expected <= 1 (of 5 rows), got 5"),
        (op, "group_list", "other", ValueError, "group_list: expected counts or cumsum, got other"),
    ]


MATMUL = [
    *matmul("grouped_matmul_fwd"),
    *sizes("grouped_matmul_fwd", "bias"),
    ("grouped_matmul_fwd", "out_dtype", torch.float16, TypeError, "y: expected dtype"),
    *outputs("grouped_matmul_fwd", "y"),
    *matmul("grouped_matmul_bwd"),
    ("grouped_matmul_bwd", "dy", nested("dy"), ValueError, "dy: expected 2 dimensions, got 3"),
    ("grouped_matmul_bwd", "needs", 8, ValueError, "needs: expected 0 to 7"),
    ("grouped_matmul_bwd.out", "accumulate", "yes", TypeError, "accumulate: expected type bool"),
    *outputs("grouped_matmul_bwd", "dx", "dweight", "dbias"),
]


def experts(op):
    return [
        (op, "x", nested("x"), ValueError, "x: expected 2 dimensions, got 3"),
        (op, "x", grown("x", 0), ValueError, "expected shape"),
        (op, "ids", grown("ids", 0), ValueError, "expected shape"),
        (op, "ids", changed("ids", (1, 1), 4), ValueError, "ids[1,1]: expected -1 or 0..3, got 4"),
        (op, "ids", changed("ids", (1, 1), -2), ValueError, "ids[1,1]: expected -1 or 0..3, got -2"),
        (op, "weights", grown("weights", 1), ValueError, "weights: expected shape [3, 2], got [3, 3]"),
        (op, "gate_up", grown("gate_up", 1), ValueError, "gate_up: expected"),
        (op, "gate_up", as_type("gate_up", torch.float64), TypeError, "gate_up: expected dtype"),
        (op, "down", grown("down", 0), ValueError, "expected shape"),
        (op, "shared_gate", grown("shared_gate", 1), ValueError, "shared_gate: expected shape [5, 8], got [5, 9]"),
        (op, "shared_up", grown("shared_up", 0), ValueError, "shared_up: expected shape [5, 8], got [6, 8]"),
        (op, "shared_up", None, ValueError, "shared_up: expected a tensor (as shared_gate), got none"),
        (op, "shared_down", grown("shared_down", 0), ValueError, "shared_down: expected shape [8, 5], got [9, 5]"),
        (op, "shared_router", nested("shared_router"), ValueError, "shared_router: expected shape [8], got [1, 8]"),
        (op, "gate_up_lora_a", grown("gate_up_lora_a", 2), ValueError, "expected shape [4, 2, 8], got [4, 2, 9]"),
        (op, "gate_up_lora_b", grown("gate_up_lora_b", 1), ValueError, "expected shape [4, 6, 2], got [4, 7, 2]"),
        (op, "gate_up_lora_b", None, ValueError, "gate_up_lora_b: expected a tensor (as gate_up_lora_a), got none"),
        (op, "down_lora_a", as_type("down_lora_a", torch.float64), TypeError, "down_lora_a: expected dtype"),
        (op, "down_lora_a", None, ValueError, "down_lora_b: expected none (as down_lora_a), got a tensor"),
        (op, "down_lora_b", grown("down_lora_b", 2), ValueError, "expected shape [4, 8, 3], got [4, 8, 4]"),
        (op, "gate_up_lora_scale", NAN, ValueError, "gate_up_lora_scale: expected a finite number, got nan"),
        (op, "down_lora_scale", "much", TypeError, "down_lora_scale: expected type float"),
        (op, "weight_axes", "nk", ValueError, "expected shape"),
        (op, "weight_axes", "other", ValueError, "weight_axes: expected nk or kn, got other"),
        (op, "interleaved", "yes", TypeError, "interleaved: expected type bool"),
        (op, "ids_convention", "other", ValueError, "ids_convention: expected plain or transformers_ep, got other"),
    ]


EXPERTS = [
    *experts("moe_experts_fwd"),
    ("moe_experts_fwd", "round_y", "yes", TypeError, "round_y: expected type bool"),
    ("moe_experts_fwd", "save_hidden", "yes", TypeError, "save_hidden: expected type bool"),
    *outputs("moe_experts_fwd", "out", "hidden"),
    ("moe_experts_fwd.out", "hidden", as_type("hidden", HALF), TypeError, "hidden: expected dtype float32, got dtype"),
    *experts("moe_experts_bwd"),
    *sizes("moe_experts_bwd", "dout"),
    ("moe_experts_bwd", "dout", as_type("dout", torch.float16), TypeError, "dout: expected dtype"),
    *sizes("moe_experts_bwd", "hidden"),
    ("moe_experts_bwd", "hidden", grown("hidden", 2), ValueError, "hidden: expected shape [6, 2, 3], got [6, 2, 4]"),
    ("moe_experts_bwd", "hidden", as_type("hidden", HALF), TypeError, "hidden: expected dtype float32, got dtype"),
    ("moe_experts_bwd", "needs", 4096, ValueError, "needs: expected 0 to 4095"),
    *outputs("moe_experts_bwd", "dx", "dweights", "dgate_up", "ddown"),
    *outputs("moe_experts_bwd", "dshared_gate", "dshared_up", "dshared_down", "dshared_router"),
    *outputs("moe_experts_bwd", "dgate_up_lora_a", "dgate_up_lora_b", "ddown_lora_a", "ddown_lora_b"),
]


def matmul_int8(op):
    return [
        (op, "x", nested("x"), ValueError, "x: expected"),
        (op, "x", as_type("x", torch.float32), TypeError, "x: expected dtype int8, got dtype float32"),
        (op, "weight", grown("weight", 2), ValueError, "expected shape"),
        (op, "weight", as_type("weight", torch.bfloat16), TypeError, "weight: expected dtype int8"),
        (op, "groups", changed("groups", 0, -1), ValueError, "groups[0]: expected >= 0, got -1"),
        (op, "groups", changed("groups", 2, 8), ValueError, "groups[2]: expected <= 3 (of 5 rows), got 8"),
        (op, "groups", grown("groups", 0), ValueError, "expected shape"),
        *sizes(op, "weight_scale", "x_scale"),
        (op, "x_scale", as_type("x_scale", HALF), TypeError, "x_scale: expected dtype float32"),
        (op, "weight_axes", "kn", ValueError, "expected shape"),
        (op, "weight_axes", "other", ValueError, "weight_axes: expected nk or kn, got other"),
        (op, "group_list", "cumsum", ValueError, "groups[1]: expected >= 2, got 0"),
        (op, "group_list", "other", ValueError, "group_list: expected counts or cumsum, got other"),
    ]


INT8 = [
    ("quantize", "x", as_type("x", torch.float64), TypeError, "x: expected dtype float32, bfloat16 or float16"),
    ("quantize", "axis", 0, ValueError, "axis: expected one of the last two dimensions, got 0"),
    ("quantize.out", "x", grown("x", 0), ValueError, "expected shape"),
    *outputs("quantize", "q", "scale"),
    *matmul_int8("grouped_matmul_quant"),
    ("grouped_matmul_quant", "out_dtype", torch.float64, TypeError, "y: expected dtype float32, bfloat16 or float16"),
    *outputs("grouped_matmul_quant", "y"),
    *matmul_int8("grouped_matmul_swiglu_quant"),
    *sizes("grouped_matmul_swiglu_quant", "smooth_scale"),
    *outputs("grouped_matmul_swiglu_quant", "q", "q_scale"),
    *[
        ("moe_experts_quant", *row[1:])
        for row in experts("moe_experts_quant")
        if not row[1].startswith("shared") and row[1] != "interleaved" and "lora" not in row[1]
    ],
    ("moe_experts_quant", "gate_up", as_type("gate_up", HALF), TypeError, "gate_up: expected dtype int8"),
    *sizes("moe_experts_quant", "gate_up_scale", "down_scale"),
    *outputs("moe_experts_quant", "out"),
]

LINEAR = [
    *[
        row
        for op in ("linear_fwd", "linear_bwd")
        for row in (
            (op, "x", grown("x", -1), ValueError, "weight: expected [N, 9], got [6, 8]"),
            (op, "weight", grown("weight", 1), ValueError, "weight: expected [N, 8], got [6, 9]"),
            (op, "weight", nested("weight"), ValueError, "weight: expected [N, 8], got [1, 6, 8]"),
            (op, "weight", as_type("weight", torch.float64), TypeError, "weight: expected dtype"),
            (op, "weight", lambda g: g["weight"].repeat(2, 2)[::2, ::2], ValueError, f"{op}: weight: expected stride"),
        )
    ],
    ("linear_fwd", "bias", grown("bias", 0), ValueError, "bias: expected [6], got [7]"),
    ("linear_fwd", "bias", nested("bias"), ValueError, "bias: expected [6], got [1, 6]"),
    ("linear_bwd", "dy", grown("dy", -1), ValueError, "dy: expected"),
    ("linear_bwd", "dy", grown("dy", 0), ValueError, "dy: expected"),
    ("linear_bwd", "dy", as_type("dy", HALF), TypeError, "dy: expected dtype"),
    ("linear_bwd", "needs", "all", TypeError, "needs: expected type int"),
    ("linear_bwd", "needs", 8, ValueError, "linear_bwd: needs: expected 0 to 7"),
]

ROWS = [*ROUTE, *ROUTING, *MATMUL, *EXPERTS, *INT8, *LINEAR]

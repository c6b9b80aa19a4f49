"""Sizes and types of every operator's tensors, for calls that have no memory: meta tensors, compiling, exporting.

A contract is a list "name dimensions type". A dimension's name stands for the size it had where it came first. Sizes
may be symbols: a call is refused when it is known to be wrong; otherwise nothing is assumed or asked about a symbol.

    *      any number of leading dimensions         @H   batch, tokens and heads H in the order of the layout
    ?B     may be left out                          #H   the same with chunks in the place of tokens
    V?     the same at the end
    K^V    V,K with state_v_first                   x    input of the convolution    y   its output, as head_num says
    n~k    k,n with weight_axes "kn"                -axis  the shape of x without its dimension `axis`
"""

import torch

LAYOUTS = {"BSND": "B,T,H", "TND": "T,H", "BNSD": "B,H,T", "NTD": "H,T"}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIDE = torch.float64
TYPES = {  # from the type of the contract's first tensor, and whether roundings are those of Transformers
    "float": lambda data, hf: FLOATS,
    "kernel": lambda data, hf: FLOATS[:3],
    "same": lambda data, hf: (data,),
    "match": lambda data, hf: (WIDE,) if data == WIDE else FLOATS[:3],
    "pool": lambda data, hf: (WIDE,) if data == WIDE else FLOATS[:2],
    "wide": lambda data, hf: (WIDE,) if data == WIDE else FLOATS[:1],
    "inter": lambda data, hf: (data,) if data in (WIDE, torch.float32) else (torch.float32, data),
    "table": lambda data, hf: TYPES["same" if hf else "inter"](data, hf),
    "sum": lambda data, hf: (torch.float32, WIDE),
    "fp32": lambda data, hf: FLOATS[:1],
    "kept": lambda data, hf: () if data == WIDE else FLOATS[:1],  # for a backward; the one in fp64 takes nothing
    "int8": lambda data, hf: (torch.int8,),
    "index": lambda data, hf: (torch.int32, torch.int64),
    "flag": lambda data, hf: (torch.bool, torch.int32, torch.int64),
}
LIMITS = {  # of a dimension: what is expected, and what would be wrong
    "HK": ("at least 1 head", lambda d: (d["HK"] < 1,)),
    "HV": ("a multiple of {HK} (key heads) heads", lambda d: (d["HV"] < 1, d["HV"] % d["HK"] != 0)),
    "K": ("at least 1 channel", lambda d: (d["K"] < 1,)),
    "V": ("at least 1 channel", lambda d: (d["V"] < 1,)),
    "C": ("a size of 16, 32, 64 or 128", lambda d: (isinstance(d["C"], int) and d["C"] not in (16, 32, 64, 128),)),
    "W": ("2 to 4 taps", lambda d: (d["W"] < 2, d["W"] > 4)),
    "S": ("a state length >= taps - 1 ({W} taps)", lambda d: (d["S"] < d["W"] - 1,)),
    "L": ("a state length >= taps - 1 ({W} taps)", lambda d: (d["L"] < d["W"] - 1,)),
    "R": ("an even R from 2 to {D}", lambda d: (d["R"] < 2, d["R"] % 2 != 0, d["R"] > d["D"])),
    "N": ("at least 2 entries", lambda d: (d["N"] < 1,)),
    "gate_up": ("twice the {inner} rows of down", lambda d: (d["gate_up"] != 2 * d["inner"],)),
    "pairs": ("one entry for each of {T} x {k} pairs", lambda d: (d["pairs"] != d["T"] * d["k"],)),
    "half": ("half of {out} columns", lambda d: (2 * d["half"] != d["out"],)),
    "slots_each": ("at least 1 column", lambda d: (d["slots_each"] < 1,)),
}

_PACKED = "cu_seqlens N+1 index"
_CONV = f"x x float; {_PACKED}; weight D,W float; bias D float; initial_state N,D,S same"
_RULE = (
    f"k @HK,K float; v @HV,V same; q @HK,K same; g @HV match; beta @HV match; {_PACKED}; A_log HV float; "
    "dt_bias HV float"
)
# The recurrence: no boundaries make every token of a packed layout a sequence.
_TOKENS = _RULE.replace("beta @HV match", "beta @HV,V? match; gk @HV,K match")
_GATING = "a @H float; b @H same; A_log H float; dt_bias H float"
_WY = (
    "k @HK,K float; v @HV,V same; beta @HV inter; A @HV,C inter; gc @HV wide; dw @HV,K inter; "
    f"du @HV,V inter; {_PACKED}"
)
_WY_GRADIENTS = "dk @HK,K inter; dv @HV,V inter; dbeta @HV wide; dg @HV wide"
_ROPE = "{0} @H,D float; cos ?B,T,R table; sin ?B,T,R table; {1} @H,D same"
_EXPERTS = (
    "x T,H float; ids T,k index; weights T,k float; down E,H~inner match; gate_up E,gate_up~H match; "
    "shared_gate J,H match; shared_up J,H match; shared_down H,J match; shared_router H match; "
    "gate_up_lora_a E,rank,H match; gate_up_lora_b E,gate_up,rank match; down_lora_a E,rank2,inner match; "
    "down_lora_b E,H,rank2 match"
)
_PRODUCT_INT8 = "x M,in int8; weight G,out~in int8; groups G index; weight_scale G,out fp32; x_scale M fp32"

_LINEAR = "x *,in float; weight out,in match"

CONTRACTS = {
    "linear_fwd": f"{_LINEAR}; bias out float; y *,out same",
    "linear_bwd": f"{_LINEAR}; dy *,out same; dx *,in same; dweight out,in match; dbias out float",
    "causal_conv1d_fwd": f"{_CONV}; y y same; final_state N,D,L same",
    "causal_conv1d_bwd": f"{_CONV}; dy y same; dfinal_state N,D,L same; dx x same; dweight D,W wide; dbias D wide; "
    "dinitial_state N,D,S same",
    "causal_conv1d_update": f"{_CONV.replace('float', 'kernel', 1)}; conv_state slots,D,S same; y y same; "
    "cache_indices N index; has_initial_state N flag; num_accepted_tokens N index; cache_seqlens N index",
    "chunk_gated_delta_rule_fwd": f"{_RULE}; initial_state N,HV,K^V match; snapshot_at M,2 index; o @HV,V same; "
    "final_state N,HV,K^V pool; snapshots M,HV,K^V wide",
    "chunk_gated_delta_rule_bwd": f"{_RULE}; do @HV,V same; dfinal_state N,HV,K^V match; initial_state N,HV,K^V match; "
    "states M,HV,K,V wide; dq @HK,K same; dk @HK,K same; dv @HV,V same; dg @HV match; dbeta @HV match; "
    "dh0 N,HV,K^V pool; dA_log HV wide; ddt_bias HV wide",
    "chunk_gated_delta_rule_pool": f"{_RULE}; state slots,HV,K^V pool; state_indices N index; "
    "has_initial_state N flag; o @HV,V same",
    "recurrent_gated_delta_rule": f"{_TOKENS}; state slots,HV,K^V pool; state_indices N,slots_each? index; "
    "num_accepted_tokens N index; has_initial_state N flag; o @HV,V same",
    "recurrent_gated_delta_rule_fwd": f"{_TOKENS}; initial_state N,HV,K^V wide; o @HV,V same; "
    "final_state N,HV,K^V wide",
    "gdn_packed_decode": f"mixed T,M kernel; z T,Z same; a T,HV same; b T,G same; {_PACKED}; "
    "conv_weight D,W float; conv_state rows,D,S same; conv_bias D float; A_log HV float; dt_bias HV float; "
    "state slots,HV,K^V pool; "
    "norm_weight V float; state_indices N,slots_each? index; conv_indices N index; num_accepted_tokens N index; "
    "y T,Z same",
    "gdn_segment_map": f"{_RULE}; phi N,HV,K,K wide; s N,HV,K,V wide",
    "gdn_segment_combine": "phi1 *,K,K sum; s1 *,K,V same; phi2 *,K,K same; s2 *,K,V same; phi *,K,K same; "
    "s *,K,V same",
    "gdn_gating_fwd": f"{_GATING}; g @H wide; beta @H match",
    "gdn_gating_bwd": f"{_GATING}; dg @H wide; dbeta @H match; da @H same; db @H same; dA_log H wide; ddt_bias H wide",
    "l2norm_fwd": "x *,D float; y *,D match; rstd * wide",
    "l2norm_bwd": "x *,D float; dy *,D match; rstd * wide; dx *,D same",
    "rms_norm_gated_fwd": "x *,D float; z *,D same; weight D float; y *,D same; rstd * wide",
    "rms_norm_gated_bwd": "x *,D float; z *,D same; weight D float; dy *,D same; rstd * wide; dx *,D same; "
    "dz *,D same; dweight D wide",
    "rms_norm_fwd": "x *,D float; weight D float; y *,D same; rstd * wide",
    "rms_norm_bwd": "x *,D float; weight D float; dy *,D same; rstd * wide; dx *,D same; dweight D wide",
    "swiglu_fwd": "gate *,D float; up *,D same; y *,D same",
    "swiglu_bwd": "gate *,D float; up *,D same; dy *,D same; dgate *,D same; dup *,D same",
    "partial_rope_fwd": _ROPE.format("x", "y"),
    "partial_rope_bwd": _ROPE.format("dy", "dx"),
    "mrope_cos_sin": "position_ids ?3,B,T index; inv_freq F fp32; cos B,T,F2 float; sin B,T,F2 float",
    "seqlens": "cu_seqlens entries index; seq_idx *,tokens index; position_ids *,tokens index",
    "chunk_local_cumsum": f"g @H float; {_PACKED}; out @H sum",
    "chunk_scaled_dot_kkt": f"k @HK,K float; beta @HV inter; gc @HV wide; {_PACKED}; A0 @HV,C inter",
    "solve_tril": f"A0 @H,C float; {_PACKED}; A @H,C match",
    "recompute_w_u": f"k @HK,K float; v @HV,V same; beta @HV inter; A @HV,C inter; gc @HV wide; {_PACKED}; "
    "w @HV,K inter; u @HV,V inter",
    "chunk_gated_delta_rule_fwd_h": f"k @HK,K float; gc @HV wide; w @HV,K inter; u @HV,V inter; {_PACKED}; "
    "initial_state N,HV,K^V match; h #HV,K,V inter; v_new @HV,V inter; final_state N,HV,K^V wide",
    "chunk_fwd_o": f"q @HK,K float; k @HK,K same; gc @HV wide; v_new @HV,V inter; {_PACKED}; h #HV,K,V inter; "
    "o @HV,V same",
    "chunk_bwd_dv_local": f"q @HK,K float; k @HK,K same; gc @HV wide; do @HV,V same; {_PACKED}; dv @HV,V inter",
    "chunk_gated_delta_rule_bwd_dhu": f"q @HK,K float; k @HK,K same; gc @HV wide; w @HV,K inter; do @HV,V same; "
    f"dv @HV,V inter; {_PACKED}; dfinal_state N,HV,K^V match; dh #HV,K,V inter; dh0 N,HV,K^V wide; dv2 @HV,V inter",
    "chunk_bwd_dqkwg": f"q @HK,K float; k @HK,K same; gc @HV wide; v_new @HV,V inter; do @HV,V same; dv2 @HV,V inter; "
    f"{_PACKED}; h #HV,K,V inter; dh #HV,K,V inter; dq @HK,K inter; dk @HK,K inter; dw @HV,K inter; dg @HV wide",
    "prepare_wy_repr_bwd_da": f"{_WY}; dA @HV,C inter",
    "prepare_wy_repr_bwd_full": f"{_WY}; dA @HV,C inter; {_WY_GRADIENTS}",
    "prepare_wy_repr_bwd": f"{_WY}; {_WY_GRADIENTS}",
    "moe_route_fwd": "logits T,E float; replay_ids T,top_k index; ids T,top_k index; weights T,top_k inter; "
    "probs T,E wide",
    "moe_route_bwd": "logits T,E float; ids T,k index; dweights T,k inter; dprobs T,E wide; dlogits T,E same",
    "moe_init_routing": "ids T,k index; counts num_experts index; src pairs index; pos T,k index",
    "moe_permute": "x T,H float; src places index; pos T,k index; y places,H same",
    "moe_unpermute_fwd": "y places,H float; pos T,k index; weights T,k float; out T,H same",
    "moe_unpermute_bwd": "y places,H float; pos T,k index; weights T,k float; dout T,H same; dy places,H same; "
    "dweights T,k float",
    "grouped_matmul_fwd": "x M,in float; weight G,out~in match; groups G index; bias G,out float; y M,out inter",
    "grouped_matmul_bwd": "dy M,out float; x M,in same; weight G,out~in match; groups G index; dx M,in match; "
    "dweight G,out~in match; dbias G,out float",
    "moe_experts_fwd": f"{_EXPERTS}; out T,H same; hidden pairs,2,inner kept",
    "quantize": "x *,D kernel; q *,D int8; scale -axis fp32",
    "grouped_matmul_swiglu_quant": f"{_PRODUCT_INT8}; smooth_scale G,half fp32; q M,half int8; q_scale M fp32",
    "grouped_matmul_quant": f"{_PRODUCT_INT8}; y M,out kernel",
    "moe_experts_quant": "x T,H kernel; ids T,k index; weights T,k float; down E,H~inner int8; down_scale E,H fp32; "
    "gate_up E,gate_up~H int8; gate_up_scale E,gate_up fp32; out T,H same",
    "moe_experts_bwd": f"{_EXPERTS}; hidden pairs,2,inner kept; dout T,H same; dx T,H same; dweights T,k float; "
    "dgate_up E,gate_up~H match; ddown E,H~inner match; dshared_gate J,H match; dshared_up J,H match; "
    "dshared_down H,J match; dshared_router H match; dgate_up_lora_a E,rank,H match; "
    "dgate_up_lora_b E,gate_up,rank match; ddown_lora_a E,rank2,inner match; ddown_lora_b E,H,rank2 match",
}
CONTRACTS = {op: [item.split() for item in text.split(";")] for op, text in CONTRACTS.items()}


def surely(condition):
    """True if it holds for every value that the symbols in it can have."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # late: brings in sympy

    return statically_known_true(condition)


def _refuse(kind, op, name, expected, got):
    raise kind(f"{op}: {name}: expected {expected}, got {got}")


def _layout(op, option, layout):
    if layout not in LAYOUTS:
        _refuse(ValueError, op, option, "BSND, TND, BNSD or NTD", layout)
    return LAYOUTS[layout]


def _conv_dimensions(op, output, order, given, d):
    lead = ["B"] if "B" in order else []
    if output and given["head_num"] != 0:
        return [*lead, given["head_num"], "T", d["D"] // given["head_num"]]
    return [*lead, "heads", "T", "width"] if order in ("B,H,T", "H,T") else [*lead, "T", "D"]


def _dimensions(op, name, text, given, d):
    """The names or sizes that a shape is compared with, in order."""
    order = _layout(op, "layout", given["layout"]) if "layout" in given else ""
    if name in ("o", "do") and given.get("out_layout") is not None:
        order = LAYOUTS[given["out_layout"]]
    if text in ("x", "y"):
        return _conv_dimensions(op, text == "y", order, given, d)
    if text == "-axis":
        d["*"] = [size for i, size in enumerate(given["x"].shape) if i != given["axis"] % given["x"].dim()]
        return ["*"]
    names = []
    for part in text.split(","):
        if part[0] in "@#":
            tokens = "T" if part[0] == "@" else "NT"
            names += [{"H": part[1:], "T": tokens}.get(n, n) for n in order.split(",")]
        elif "~" in part:
            names += reversed(part.split("~")) if given["weight_axes"] == "kn" else part.split("~")
        elif "^" in part:
            kept = name == "snapshots" and given.get("save_states")  # what a backward wants is K-first always
            names += reversed(part.split("^")) if given["state_v_first"] and not kept else part.split("^")
        else:
            names.append(int(part) if part.isdigit() else part)
    return names


def _check_shape(op, name, tensor, names, d):
    shape = list(tensor.shape)
    if str(names[0])[0] == "?":
        first = int(names[0][1:]) if names[0][1:].isdigit() else names[0][1:]
        given = len(shape) == len(names) and (first in d or isinstance(first, int))
        names = [first, *names[1:]] if given else names[1:]
    if str(names[-1])[-1] == "?":
        names = [*names[:-1], names[-1][:-1]] if len(shape) == len(names) else names[:-1]
    if names[0] == "*":
        rest = names[1:]
        lead = d.setdefault("*", shape[: max(0, len(shape) - len(rest))])
        names = [*lead, *rest]
    size_of = lambda n: d.get(n, n) if isinstance(n, str) else n  # noqa: E731
    bound = []  # by this tensor
    fits = len(shape) == len(names)
    for n, size in zip(names, shape, strict=False) if fits else ():
        if n == "N+1":
            n, size = "N", size - 1
        if isinstance(n, str) and n not in d:
            d[n] = size
            bound.append(n)
        fits = fits and not surely(size_of(n) != size)
    if not fits:
        expected = ", ".join(str(size_of(n)) for n in names)
        _refuse(ValueError, op, name, f"shape [{expected}]", f"[{', '.join(map(str, shape))}]")
    for n in bound:
        text, wrong = LIMITS.get(n, ("", lambda d: ()))
        if any(map(surely, wrong(d))):
            _refuse(ValueError, op, name, text.format_map(d), d[n])


def _check_devices(op, given):
    """A stray device would otherwise pick a fake kernel for real tensors and hand out memory nobody wrote."""
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    first = next(iter(tensors), None)
    for name, tensor in tensors.items():
        if tensor.device != tensors[first].device:
            _refuse(ValueError, op, name, f"device {tensors[first].device} (as {first})", tensor.device)


def check(op, given):
    """Raises ValueError or TypeError for tensors that do not fit the contract. given: all arguments by name."""
    _check_devices(op, given)
    sizes = ("tokens", "HK", "HV", "K", "V", "top_k", "num_experts")
    d = {name: given[name] for name in sizes if name in given}  # sizes by name
    if op == "gdn_packed_decode":
        separate = given["projection"] == "qkv"
        d["Z"] = d["HV"] * d["V"]
        d["D"] = 2 * d["HK"] * d["K"] + d["Z"]
        d["M"], d["G"] = (d["D"], d["HV"]) if separate else (d["D"] + d["Z"], 2 * d["HV"])
    if "axis" in given:
        rank = given["x"].dim()
        if given["axis"] not in (-1, rank - 1, *((-2, rank - 2) if rank > 1 else ())):
            _refuse(ValueError, op, "axis", "one of the last two dimensions", given["axis"])
    data = None
    contract = CONTRACTS.get(op, ())
    if "chunk_size" in given and any("C" in item[1] or "#" in item[1] for item in contract):
        d["C"] = given["chunk_size"]
        if any(LIMITS["C"][1](d)):
            _refuse(ValueError, op, "chunk_size", "a chunk " + LIMITS["C"][0][2:], d["C"])
    if given.get("out_layout") is not None and ("B" in _layout(op, "out_layout", given["out_layout"])) != (
        "B" in _layout(op, "layout", given["layout"])
    ):
        kinds = "BSND or BNSD with a batched layout, TND or NTD with a packed one"
        _refuse(ValueError, op, "out_layout", kinds, given["out_layout"])
    for name, text, kind in contract:
        tensor = given.get(name)
        if name == "cu_seqlens" and tensor is None:
            decodes = op.startswith(("recurrent", "gdn_packed")) and "B" not in d
            d["N"] = d["T"] if decodes else d.get("B", 1)
            if "C" in d:
                d["NT"] = (d["T"] + d["C"] - 1) // d["C"]
        if tensor is None:
            continue
        data = data or tensor.dtype
        types = TYPES[kind](data, given.get("rounding") == "hf")
        if not types:
            _refuse(ValueError, op, name, f"none with {str(data).removeprefix('torch.')}", "a tensor")
        if tensor.dtype not in types:
            *most, last, got = (str(t).removeprefix("torch.") for t in (*types, tensor.dtype))
            expected = f"{', '.join(most)} or {last}" if most else last
            _refuse(TypeError, op, name, f"dtype {expected}", f"dtype {got}")
        if name == "cu_seqlens" and surely(d.get("B", 1) != 1):
            _refuse(ValueError, op, name, "none with more than one row", f"{d['B']} rows")
        _check_shape(op, name, tensor, _dimensions(op, name, text, given, d), d)
        if text == "x":
            d["D"] = d["D"] if "D" in d else d["heads"] * d["width"]
            heads = given["head_num"]
            if heads < 0 or (heads > 0 and surely(d["D"] % heads != 0)):
                _refuse(ValueError, op, "head_num", f"0 or a divisor of {d['D']} channels", heads)

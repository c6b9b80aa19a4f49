"""Small valid calls of every operator, for tests that go over all of them.

SAMPLES[name] makes a list of (args, kwargs). The calls of an .out form are derived from these. A new operator must be
added here: the tests compare with the registry.
"""

import samples_backward
import samples_chunk
import samples_moe
import torch
from samples_data import data as _data
from samples_data import floats as _floats

NO_TENSORS = {"about", "chunk_size", "set_isa"}  # facts and a switch, nothing to compute


def operators():
    """Every operator of the library as torch knows it, with its overload: l2norm_fwd, l2norm_fwd.out, ..."""
    names = (name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("tidegate::"))
    return sorted(set(names) - NO_TENSORS)


def overload(name):
    """torch.ops.tidegate.<name> of a name with or without overload."""
    base, _, form = name.partition(".")
    return getattr(getattr(torch.ops.tidegate, base), form or "default")


def written(op):
    """Names of the arguments that an operator writes into."""
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def arguments(op, args, kwargs):
    """All given arguments by name."""
    return dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs


def samples(name):
    base, _, form = name.partition(".")
    calls = SAMPLES[base]()
    return calls if not form else [out_call(base, *call) for call in calls]


def results(name, args, kwargs):
    """What a functional call returns, by name."""
    op = overload(name)
    with torch.no_grad():
        values = op(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
    values = values if isinstance(values, tuple) else (values,)
    return {slot.name: value for slot, value in zip(op._schema.returns, values, strict=True)}


def out_call(base, args, kwargs):
    """The call of the .out form that computes the same as a functional call, into tensors full of ones."""
    known = {a.name for a in overload(base + ".out")._schema.arguments}
    if kwargs.get("save_states"):  # for a backward, which an .out form does not have
        kwargs = {**kwargs, "save_states": False}
    outputs = {k: torch.ones_like(v) for k, v in results(base, args, kwargs).items() if v.numel()}
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    return args, {k: v for k, v in kwargs.items() if k in known} | outputs


def _conv_fwd():
    packed = {"cu_seqlens": torch.tensor([0, 3, 3, 9]), "activation": "silu", "output_final_state": True}
    state = _floats(3, 8, 4)
    return [
        ([_floats(2, 5, 8), _floats(8, 4)], {}),
        ([_floats(1, 9, 8), _floats(8, 4), _floats(8), state], {**packed, "head_num": 2}),
        ([_floats(2, 9, 4), _floats(8, 3)], {**packed, "state_len": 5, "layout": "NTD"}),
    ]


def _conv_bwd():
    cu = {"cu_seqlens": torch.tensor([0, 3, 3, 9])}
    state, final = _floats(3, 8, 4), _floats(3, 8, 4)
    return [
        ([_floats(2, 5, 8), _floats(2, 5, 8), _floats(8, 4)], {}),
        (
            [_floats(1, 2, 9, 4), _floats(1, 9, 8), _floats(8, 4), _floats(8), state, final],
            {**cu, "activation": "silu", "head_num": 2},
        ),
    ]


def _conv_update():
    pool = [_floats(4, 8, 6, grad=False), _floats(8, 4, grad=False), _floats(8, grad=False)]
    x, cu = _floats(6, 8, grad=False), torch.tensor([0, 2, 2, 6])
    rows = {"cu_seqlens": cu, "cache_indices": torch.tensor([3, -1, 0]), "has_initial_state": torch.tensor([1, 1, 0])}
    return [
        ([x, *pool], {**rows, "activation": "silu", "head_num": 2}),
        ([x, *pool], {"cu_seqlens": cu, "num_accepted_tokens": torch.tensor([1, 2, 1])}),
        ([x.view(2, 3, 8), *pool[:2]], {"cache_seqlens": torch.tensor([4, 9]), "layout": "BSND"}),
    ]


def _rule_inputs(tokens, heads, dtype=torch.float32):
    """q, k, v, g, beta of two value heads per key head, K = 4, V = 3; tokens(H) is the shape before the channels."""
    keys, values = tokens(heads), tokens(2 * heads)
    qkv = [_floats(*shape, dtype=dtype, grad=False) / 2 for shape in ((*keys, 4), (*keys, 4), (*values, 3))]
    return [*qkv, -torch.rand(values), torch.rand(values)]


def _rule_options():
    heads = [_floats(4, grad=False), _floats(4, grad=False)]
    inside = {"use_qk_l2norm": True, "A_log": heads[0], "dt_bias": heads[1], "beta_sigmoid": True, "beta_scale": 2.0}
    return {**inside, "cu_seqlens": torch.tensor([0, 3, 3, 9]), "layout": "TND", "precision": "bf16"}


def _with_gradients(tensors):
    return [t.requires_grad_() for t in tensors]


def _rule_fwd():
    batch = _with_gradients(_rule_inputs(lambda heads: (2, 5, heads), 1))
    long = _with_gradients(_rule_inputs(lambda heads: (600, heads), 1))
    training = {"save_states": True, "zero_row_safe": True, "layout": "TND", "state_v_first": True}
    training |= {"cu_seqlens": torch.tensor([0, 10, 310, 600])}
    packed = _rule_inputs(lambda heads: (9, heads), 2, torch.bfloat16)
    states = {"initial_state": _floats(3, 4, 3, 4, grad=False), "state_v_first": True, "output_final_state": True}
    points = torch.tensor([[0, 2], [2, 6], [1, 0]])
    outputs = {"snapshot_at": points, "scale": 0.5, "out_layout": "NTD"}
    return [(batch, {}), (packed, {**_rule_options(), **states, **outputs}), (long, training)]


def _rule_bwd():
    batch = _rule_inputs(lambda heads: (2, 5, heads), 1)
    packed = _rule_inputs(lambda heads: (309, heads), 2, torch.bfloat16)
    options = {k: v for k, v in _rule_options().items() if k != "precision"}
    options |= {"cu_seqlens": torch.tensor([0, 3, 3, 309]), "initial_state": _floats(3, 4, 3, 4, grad=False)}
    options |= {"states": _floats(1, 4, 4, 3, grad=False), "state_v_first": True, "scale": 0.5, "out_layout": "NTD"}
    do = _floats(4, 309, 3, dtype=torch.bfloat16, grad=False)
    return [
        ([_floats(2, 5, 2, 3, grad=False), None, *batch], {"needs": 0b11010}),
        ([do, _floats(3, 4, 3, 4, grad=False), *packed], options | {"zero_row_safe": True}),
    ]


def _rule_pool():
    rows = {"state_indices": torch.tensor([3, -1, 0]), "has_initial_state": torch.tensor([1, 1, 0])}
    packed = _rule_inputs(lambda heads: (9, heads), 2, torch.bfloat16)
    batch = _rule_inputs(lambda heads: (2, heads, 5), 1)
    options = {"null_slot": -7, "state_v_first": True, "scale": 0.5, "out_layout": "BSND", "layout": "BNSD"}
    return [
        ([*packed, _floats(5, 4, 4, 3, grad=False)], {**_rule_options(), **rows}),
        ([*batch, _floats(3, 2, 3, 4, grad=False)], {"state_indices": torch.tensor([1, -7]), **options}),
    ]


def _recurrent_options():
    options = _rule_options()
    del options["precision"]
    return options


def _recurrent_pool():
    """Verification of 3, 0 and 6 tokens on slots of their own, everything inside; and a decode step, V-first."""
    packed = _rule_inputs(lambda heads: (9, heads), 2, torch.bfloat16)
    slots = torch.tensor([[3, 0, 7, -1, -1, -1], [-1] * 6, [1, 2, 4, 5, 6, 8]])
    rows = {"state_indices": slots, "num_accepted_tokens": torch.tensor([2, 1, 6])}
    more = {"has_initial_state": torch.tensor([1, 1, 0]), "gk": -torch.rand(9, 4, 4)}
    step = _rule_inputs(lambda heads: (heads, 3), 1)
    options = {"null_slot": -7, "state_v_first": True, "scale": 0.5, "layout": "NTD"}
    return [
        ([*packed, _floats(9, 4, 4, 3, grad=False)], {**_recurrent_options(), **rows, **more}),
        ([*step, _floats(4, 2, 3, 4, grad=False)], {"state_indices": torch.tensor([1, -7, 0]), **options}),
    ]


def _recurrent_fwd():
    batch = _with_gradients(_rule_inputs(lambda heads: (2, 5, heads), 1))
    packed = _rule_inputs(lambda heads: (9, heads), 2, torch.bfloat16)
    states = {"initial_state": _floats(3, 4, 3, 4, grad=False), "state_v_first": True, "output_final_state": True}
    more = {"gk": -torch.rand(9, 4, 4), "scale": 0.5}
    return [(batch, {}), (packed, {**_recurrent_options(), **states, **more})]


def _packed_decode():
    """A decode step of three sequences, and verification of 2, 0 and 3 tokens; 2 key heads, 4 value heads, K 4, V 3."""
    sizes, D = {"HK": 2, "HV": 4, "K": 4, "V": 3}, 28
    heads, norm = [_data(4), _data(4)], _data(3)
    step = [_data(3, D), _data(3, 12), _data(3, 4), _data(3, 4), _data(5, D, 3), _data(D, 4), _data(D), *heads]
    verify = [_data(5, 40).bfloat16(), None, None, _data(5, 8).bfloat16(), _data(4, D, 5).bfloat16(), _data(D, 3)]
    slots = torch.tensor([[6, 1, 2], [0, 0, 0], [3, 4, 5]])
    rows = {"cu_seqlens": torch.tensor([0, 2, 2, 5]), "num_accepted_tokens": torch.tensor([2, 1, 1])}
    more = {"projection": "qkvz_ba", "state_v_first": True, "activation": "sigmoid", "norm_rounding": "fp32"}
    return [
        ([*step, _data(5, 4, 4, 3), norm], {"state_indices": torch.tensor([4, -1, 0]), **sizes}),
        (
            [*verify, None, heads[0], None, _data(7, 4, 3, 4), norm],
            {"state_indices": slots, "conv_indices": torch.tensor([3, 0, 1]), **sizes, **rows, **more, "scale": 0.5},
        ),
    ]


def _segment_map():
    batch = _rule_inputs(lambda heads: (2, 5, heads), 1)
    packed = _rule_inputs(lambda heads: (9, heads), 2, torch.bfloat16)
    return [(batch[1:], {}), (packed[1:], _rule_options())]


def _segment_combine():
    phi, s = (2, 3, 4, 4), (2, 3, 4, 5)
    return [([_floats(*shape, grad=False) for shape in (phi, s, phi, s)], {})]


def _gating(*gradients):
    a, b, heads = _floats(2, 5, 3), _floats(2, 5, 3), _floats(3)
    halves = [t.detach().to(torch.bfloat16).requires_grad_() for t in (a, b)]
    options = {"beta_scale": 2.0, "layout": "BNSD"}
    second = [*(g.detach().to(torch.float32) for g in gradients), *halves, _floats(5), _floats(5)]
    return [([*gradients, a, b, heads], {}), (second, options)]


def _gating_fwd():
    first, (args, options) = _gating()
    return [first, (args, {**options, "beta_dtype": torch.float32})]


def _gating_bwd():
    return _gating(_floats(2, 5, 3), _floats(2, 5, 3))


def _l2norm_fwd():
    return [
        ([_floats(2, 5, 8)], {}),
        ([_floats(4, 6, dtype=torch.bfloat16)], {"eps": 1e-5, "out_dtype": torch.float32}),
    ]


def _rows(*more):
    return [t.requires_grad_() for t in (torch.randn(2, 3, 8), *more)]


def _rstd():
    return (torch.rand(2, 3) + 0.5).requires_grad_()


def _l2norm_bwd():
    return [([*_rows(torch.randn(2, 3, 8)), _rstd()], {"zero_row_safe": safe}) for safe in (False, True)]


def _gated_fwd():
    x, z = _rows(torch.randn(2, 3, 8))
    return [
        ([x, z, _floats(8)], {"rounding": "fp32", "activation": "sigmoid", "eps": 1e-5}),
        ([x.detach().bfloat16(), z.detach().bfloat16(), None], {"out_memory": "swapped"}),
    ]


def _gated_bwd():
    rows = _rows(torch.randn(2, 3, 8), torch.randn(2, 3, 8))
    return [([*rows, _floats(8), _rstd()], {"activation": "sigmoid"}), ([*rows, None, _rstd()], {"rounding": "fp32"})]


def _rms_fwd():
    return [([_floats(2, 3, 8), _floats(8)], {}), ([_floats(4, 6, dtype=torch.float16), _floats(6)], {"eps": 1e-5})]


def _rms_bwd():
    return [([*_rows(torch.randn(2, 3, 8)), _floats(8), _rstd()], {})]


def _swiglu(*more):
    return [
        ([*_rows(torch.randn(2, 3, 8), *more)], {}),
        ([t.detach().bfloat16().requires_grad_() for t in _rows(torch.randn(2, 3, 8), *more)], {}),
    ]


def _rope():
    cos, sin = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    return [
        ([_floats(2, 3, 5, 8), cos, sin], {}),
        ([_floats(5, 3, 8, dtype=torch.bfloat16), cos[0], sin[0]], {"layout": "TND", "rounding": "fp32"}),
    ]


def _mrope():
    ids, inv_freq = torch.randint(0, 50, (3, 2, 5)), torch.rand(4)
    return [([ids, inv_freq, [2, 1, 1]], {"scaling": 0.5}), ([ids[0], inv_freq, [2, 1, 1]], {"dtype": torch.bfloat16})]


def _seqlens():
    cu, ids = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 0, 1, 1, 1])
    return [([cu, ids, torch.tensor([0, 1, 0, 1, 2])], {"tokens": 5}), ([None, ids], {"tokens": 5})]


SAMPLES = {
    "causal_conv1d_fwd": _conv_fwd,
    "causal_conv1d_bwd": _conv_bwd,
    "causal_conv1d_update": _conv_update,
    "chunk_gated_delta_rule_fwd": _rule_fwd,
    "chunk_gated_delta_rule_bwd": _rule_bwd,
    "chunk_gated_delta_rule_pool": _rule_pool,
    "recurrent_gated_delta_rule": _recurrent_pool,
    "recurrent_gated_delta_rule_fwd": _recurrent_fwd,
    "gdn_packed_decode": _packed_decode,
    "gdn_segment_map": _segment_map,
    "gdn_segment_combine": _segment_combine,
    "gdn_gating_fwd": _gating_fwd,
    "gdn_gating_bwd": _gating_bwd,
    "l2norm_fwd": _l2norm_fwd,
    "l2norm_bwd": _l2norm_bwd,
    "rms_norm_gated_fwd": _gated_fwd,
    "rms_norm_gated_bwd": _gated_bwd,
    "rms_norm_fwd": _rms_fwd,
    "rms_norm_bwd": _rms_bwd,
    "swiglu_fwd": _swiglu,
    "swiglu_bwd": lambda: _swiglu(torch.randn(2, 3, 8)),
    "partial_rope_fwd": _rope,
    "partial_rope_bwd": _rope,
    "mrope_cos_sin": _mrope,
    "seqlens": _seqlens,
    **samples_chunk.SAMPLES,
    **samples_backward.SAMPLES,
    **samples_moe.SAMPLES,
}

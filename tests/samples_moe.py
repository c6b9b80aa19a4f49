"""Small valid calls of the operators of the experts, see samples.py."""

import torch
from samples_data import data as _data
from samples_data import floats as _floats

IDS = torch.tensor([[2, 0], [2, 1], [-1, 2]])  # counts 1, 1, 3, 0
SRC = torch.tensor([1, 3, 0, 2, 5, -1])
POS = torch.tensor([[2, 0], [3, 1], [-1, 4]])


def _route_fwd():
    half = {"logits_rounding": torch.bfloat16, "weights_dtype": torch.float32, "renormalise": False}
    return [
        ([_floats(3, 8)], {"top_k": 2}),
        ([_floats(3, 8, dtype=torch.bfloat16), IDS], {"top_k": 2, "output_probs": True, **half}),
    ]


def _route_bwd():
    half = [_data(3, 2), _data(3, 8), _data(3, 8, dtype=torch.bfloat16), IDS]
    options = {"renormalise": False, "logits_rounding": torch.float16}
    return [([_data(3, 2), None, _data(3, 8), IDS.int()], {}), (half, options)]


def _init_routing():
    ep = torch.where(IDS < 0, 4, IDS).int()
    return [([IDS], {"num_experts": 4}), ([ep], {"num_experts": 4, "ids_convention": "transformers_ep"})]


def _permute():
    return [([_floats(3, 8), SRC, POS], {})]


def _unpermute_fwd():
    return [([_floats(6, 8), POS, _floats(3, 2)], {}), ([_floats(6, 8, dtype=torch.bfloat16), POS.int()], {})]


def _unpermute_bwd():
    return [([_data(3, 8), _data(6, 8), POS, _data(3, 2)], {}), ([_data(3, 8), _data(6, 8), POS], {})]


def _turned(*shape, dtype=torch.float32, grad=True):
    """A weight whose last two dimensions stand the other way round in memory."""
    return torch.randn(shape).to(dtype).transpose(-2, -1).contiguous().transpose(-2, -1).requires_grad_(grad)


COUNTS, SUMS = torch.tensor([2, 0, 3]), torch.tensor([2, 2, 5], dtype=torch.int32)


def _matmul_fwd():
    turned = _turned(3, 6, 4)
    options = {"weight_axes": "kn", "group_list": "cumsum", "out_dtype": torch.float32}
    return [
        ([_floats(5, 6), _floats(3, 4, 6), COUNTS, _floats(3, 4)], {}),
        ([_floats(5, 6, dtype=torch.bfloat16), turned, SUMS], options),
    ]


def _matmul_bwd():
    turned = _turned(3, 6, 4, grad=False)
    return [
        ([_data(5, 4), _data(5, 6), _data(3, 4, 6), COUNTS], {}),
        (
            [_data(5, 4), _data(5, 6), turned, SUMS],
            {"weight_axes": "kn", "group_list": "cumsum", "needs": 2},
        ),
    ]


def _experts(grad, dtype=torch.float32, shared=False):
    make = lambda *shape: _floats(*shape, dtype=dtype, grad=grad)  # noqa: E731
    inputs = [make(3, 8), IDS, _floats(3, 2, grad=grad), make(4, 6, 8), make(4, 8, 3)]
    if not shared:
        return inputs
    lora = [make(4, 2, 8), make(4, 6, 2), make(4, 3, 3), make(4, 8, 3)]
    return [*inputs, make(5, 8), make(5, 8), make(8, 5), make(8), *lora]


SCALES = {"gate_up_lora_scale": 2.0, "down_lora_scale": -0.5}


def _experts_calls(grad):
    turned = [_data(3, 8), IDS.int(), _data(3, 2), _turned(4, 8, 6, grad=False), _turned(4, 3, 8, grad=False)]
    ep = {"weight_axes": "kn", "ids_convention": "transformers_ep"}
    return [(_experts(grad), {}), (_experts(grad, torch.bfloat16, True), dict(SCALES, interleaved=True)), (turned, ep)]


def _experts_fwd():
    first, second, third = _experts_calls(True)
    training = (_experts(True), {"save_hidden": True})
    turned = (third[0], {**third[1], "save_hidden": True})
    return [first, (second[0], {**second[1], "round_y": True, "save_hidden": True}), third, training, turned]


def _experts_bwd():
    calls = [([_data(3, 8, dtype=args[0].dtype), *args], kwargs) for args, kwargs in _experts_calls(False)]
    kept = [_data(6, 2, 3) for _ in calls]  # any numbers: they are read as they are
    return [
        calls[0],
        (calls[1][0], {**calls[1][1], "hidden": kept[0]}),
        (calls[2][0], {**calls[2][1], "needs": 5}),
        (calls[0][0], {"hidden": kept[1]}),
        (calls[2][0], {**calls[2][1], "hidden": kept[2]}),
    ]


def _int8(*shape):
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def _quantize():
    return [
        ([_data(3, 7)], {}),
        ([_data(2, 6, 5, dtype=torch.bfloat16)], {"axis": -2}),
        ([_turned(2, 6, 5, grad=False)], {"axis": 1}),
    ]


def _scales(*shape):
    return torch.rand(*shape) * 0.01 + 0.001


def _matmul_int8(smooth):
    first = [_int8(5, 6), _int8(3, 4, 6), COUNTS, _scales(3, 4), _scales(5)]
    turned = _int8(3, 4, 6).transpose(1, 2)
    second = [_int8(5, 6), turned, SUMS, _scales(3, 4), _scales(5)]
    plain, options = {"weight_axes": "nk", "group_list": "counts"}, {"weight_axes": "kn", "group_list": "cumsum"}
    if smooth:
        return [([*first, _scales(3, 2)], plain), (second, options)]
    return [(first, plain), (second, {**options, "out_dtype": torch.bfloat16})]


def _experts_int8():
    weights = [_int8(4, 6, 8), _scales(4, 6), _int8(4, 8, 3), _scales(4, 8)]
    ep = {"weight_axes": "kn", "ids_convention": "transformers_ep"}
    turned = [_int8(4, 8, 6), _scales(4, 6), _int8(4, 3, 8), _scales(4, 8)]
    return [
        ([_data(3, 8), IDS, _data(3, 2), *weights], {}),
        ([_data(3, 8, dtype=torch.bfloat16), IDS.int(), _data(3, 2), *turned], ep),
    ]


def _linear_fwd():
    half = [_floats(5, 8, dtype=torch.bfloat16), _turned(6, 8, dtype=torch.bfloat16)]
    return [([_floats(2, 3, 8), _floats(6, 8), _floats(6)], {}), (half, {})]


def _linear_bwd():
    half = [_data(5, n, dtype=torch.bfloat16) for n in (6, 8)]
    return [
        ([_data(2, 3, 6), _data(2, 3, 8), _data(6, 8)], {}),
        ([*half, _data(6, 8, dtype=torch.bfloat16)], {"needs": 3}),
    ]


SAMPLES = {
    "linear_fwd": _linear_fwd,
    "linear_bwd": _linear_bwd,
    "quantize": _quantize,
    "grouped_matmul_swiglu_quant": lambda: _matmul_int8(True),
    "grouped_matmul_quant": lambda: _matmul_int8(False),
    "moe_experts_quant": _experts_int8,
    "moe_route_fwd": _route_fwd,
    "moe_route_bwd": _route_bwd,
    "moe_init_routing": _init_routing,
    "moe_permute": _permute,
    "moe_unpermute_fwd": _unpermute_fwd,
    "moe_unpermute_bwd": _unpermute_bwd,
    "grouped_matmul_fwd": _matmul_fwd,
    "grouped_matmul_bwd": _matmul_bwd,
    "moe_experts_fwd": _experts_fwd,
    "moe_experts_bwd": _experts_bwd,
}

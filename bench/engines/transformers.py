"""Transformers' own torch code for Qwen3.5 layers: what a model runs when no kernel package is installed."""

import torch

from engines import Run
from engines.delta_rule import forward_backward, per_sequence, repeated
from engines.experts import sampled
from engines.torch_eager import conv_backward, gates
from items import BF16, SLOTS, WIDTH, H

PACKAGES = {"transformers": "5.22"}
LACKS: dict[str, str] = {}
_m = None


def load(threads):
    global _m
    from transformers.models.qwen3_5 import modeling_qwen3_5

    _m = modeling_qwen3_5
    torch.set_num_threads(threads)


def _torch_form(name):
    """The torch fallback, also when a kernel package has replaced the public name."""
    return getattr(_m, name).__wrapped__


def _prefill(item, x):
    chunk = _torch_form("torch_chunk_gated_delta_rule")
    return per_sequence(item, x, lambda q, k, v, g, beta: chunk(q, k, v, g=g, beta=beta, output_final_state=True))


def _train(item, x):
    chunk = _torch_form("torch_chunk_gated_delta_rule")
    return forward_backward(item, x, lambda q, k, v, g, beta: chunk(q, k, v, g=g, beta=beta)[0])


def _decode(item, x):
    step, (q, k) = _torch_form("torch_recurrent_gated_delta_rule"), repeated(x, item.sizes["HV"])

    def call():
        return step(q, k, x["v"], x["g"], x["beta"], initial_state=x["state"], output_final_state=True)

    return Run(call, lambda r: {"o": r[0], "S": r[1]}, "state not in place")


def _conv(item, x):
    conv, view = _torch_form("causal_conv1d_fn"), x["x"].T[None]
    return Run(lambda: conv(view, x["w"], None, "silu"), lambda y: {"y": y[0].T})


def _conv_bwd(item, x):
    conv = _torch_form("causal_conv1d_fn")
    return conv_backward(lambda x, w: conv(x.T[None], w, None, "silu"))(item, x)


def _conv_update(item, x):
    update = _torch_form("causal_conv1d_update")
    state = torch.nn.functional.pad(x["state"], (1, 0))  # its cache keeps W columns
    column = x["x"][:, :, None]
    return Run(lambda: update(column, state, x["w"], None, "silu"), lambda y: {"y": y[..., 0], "state": state[..., 1:]})


def _module(cls, x):
    module = cls(len(x["w"]), eps=1e-6).to(BF16)
    module.weight.data.copy_(x["w"])
    return module


def _norm_gated(item, x):
    norm = _module(_m.Qwen3_5RMSNormGated, x)
    return Run(lambda: norm(x["x"], x["z"]), lambda y: {"y": y})


def _rms_norm(item, x):
    norm = _module(_m.Qwen3_5RMSNorm, x)
    return Run(lambda: norm(x["x"]), lambda y: {"y": y})


def _l2norm(item, x):
    return Run(lambda: _m.l2norm(x["x"].float(), dim=-1, eps=1e-6).to(BF16), lambda y: {"y": y})


def _rope(item, x):
    none = x["x"][:, :0]  # the function also rotates k: here a k without heads
    return Run(lambda: _m.apply_rotary_pos_emb(x["x"], none, x["cos"], x["sin"])[0], lambda y: {"y": y})


def _layer(item, x, implementation, grad):
    from transformers import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

    E = item.sizes["E"]
    config = Qwen3_5MoeTextConfig(hidden_size=H, moe_intermediate_size=WIDTH, num_experts=E, num_experts_per_tok=SLOTS)
    config._experts_implementation = implementation
    with torch.device("meta"):
        layer = Qwen3_5MoeExperts(config)
    for name in ("gate_up", "down"):
        setattr(layer, name + "_proj", torch.nn.Parameter(x[name], requires_grad=grad))
    return layer, x["ids"].long(), x["weights"].to(BF16)  # as its router hands them over


def _experts(implementation):
    def build(item, x):
        layer, ids, weights = _layer(item, x, implementation, False)
        return Run(lambda: layer(x["x"], ids, weights), lambda y: {"y": y}, "bf16 routing weights")

    return build


def _experts_bwd(implementation):
    def build(item, x):
        layer, ids, weights = _layer(item, x, implementation, True)
        with torch.enable_grad():
            leaves = x["x"].detach().requires_grad_(), weights.requires_grad_(), *layer.parameters()
            y = layer(leaves[0], ids, leaves[1])
        names = ("dx", "dw", "dgate_up", "ddown")

        def call():
            return torch.autograd.grad(y, leaves, x["dout"], retain_graph=True)

        note = "saved forward not timed, bf16 routing weights"
        return Run(call, lambda r: sampled(dict(zip(names, r, strict=True))), note)

    return build


ENTRIES = {
    "prefill": {"": _prefill},
    "decode": {"": _decode},
    "train": {"": _train},
    "conv": {"": _conv},
    "conv_bwd": {"": _conv_bwd},
    "conv_update": {"": _conv_update},
    "norm_gated": {"": _norm_gated},
    "l2norm": {"": _l2norm},
    "rms_norm": {"": _rms_norm},
    "gating": {"": gates},  # the layer's two lines, the same expression
    "rope": {"": _rope},
    "experts": {name: _experts(name) for name in ("grouped_mm", "eager")},
    "experts_bwd": {"grouped_mm": _experts_bwd("grouped_mm")},
}

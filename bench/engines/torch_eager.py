"""Plain torch expressions, as somebody without any of these packages would write them."""

import torch
import torch.nn.functional as F

from engines import Run

PACKAGES = {"torch": None}
_CHAIN = "its plain torch form is the transformers row"
LACKS = {kind: _CHAIN for kind in ("prefill", "decode", "train", "experts", "experts_bwd")}


def load(threads):
    torch.set_num_threads(threads)


def _one(name, call):
    """A builder for call(x) -> one result."""
    return lambda item, x: Run(lambda: call(x), lambda r: {name: r})


def conv1d(x, w):
    """[1,D,T] from token-major x [T,D]; the transposed view is what models pass."""
    return F.conv1d(x.T[None], w[:, None], padding=w.shape[1] - 1, groups=len(w))[..., : len(x)]


def _conv(item, x):
    return Run(lambda: F.silu(conv1d(x["x"], x["w"])), lambda y: {"y": y[0].T})


def _conv_taps(item, x):
    w, T = x["w"].float(), len(x["x"])

    def call():
        padded = F.pad(x["x"].float(), (0, 0, w.shape[1] - 1, 0))
        return F.silu(sum(w[:, j] * padded[j : j + T] for j in range(w.shape[1]))).to(x["x"].dtype)

    return Run(call, lambda y: {"y": y}, "shifted products in fp32")


def conv_backward(forward):
    """Times autograd's backward alone: the graph is built once and kept."""

    def build(item, x):
        with torch.enable_grad():
            inputs = x["x"].detach().clone().requires_grad_(), x["w"].detach().clone().requires_grad_()
            y = forward(*inputs)

        def call():
            return torch.autograd.grad(y, inputs, x["dy"].T[None], retain_graph=True)

        return Run(call, lambda r: {"dx": r[0], "dw": r[1]}, "saved forward not timed")

    return build


def _conv_update(item, x):
    state = x["state"].clone()

    def call():
        window = torch.cat([state, x["x"][:, :, None]], -1)
        state.copy_(window[..., 1:])
        return F.silu((window * x["w"]).float().sum(-1)).to(x["x"].dtype)

    return Run(call, lambda y: {"y": y, "state": state})


def _norm_gated(x):
    n = F.rms_norm(x["x"].float(), x["w"].shape, x["w"].float(), 1e-6)
    return (n * F.silu(x["z"].float())).to(x["x"].dtype)


def _l2norm(x):
    v = x["x"].float()
    return (v * torch.rsqrt(v.square().sum(-1, True) + 1e-6)).to(x["x"].dtype)


def _rms_norm(x):
    return F.rms_norm(x["x"].float(), x["w"].shape, 1 + x["w"].float(), 1e-6).to(x["x"].dtype)


def _rope(x):
    cos, sin, v = x["cos"][:, None], x["sin"][:, None], x["x"]
    R = cos.shape[-1]
    turned, rest = v[..., :R], v[..., R:]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def gates(item, x):
    def call():
        g = -x["A_log"].float().exp() * F.softplus(x["a"].float() + x["dt_bias"])
        return g, x["b"].sigmoid()

    return Run(call, lambda r: {"g": r[0], "beta": r[1]})


ENTRIES = {
    "conv": {"": _conv, "taps": _conv_taps},
    "conv_bwd": {"": conv_backward(lambda x, w: F.silu(conv1d(x, w)))},
    "conv_update": {"": _conv_update},
    "norm_gated": {"": _one("y", _norm_gated)},
    "l2norm": {"": _one("y", _l2norm)},
    "rms_norm": {"": _one("y", _rms_norm)},
    "gating": {"": gates},
    "rope": {"": _one("y", _rope)},
}

"""Row operators in plain torch: l2norm, RMSNorm, gated RMSNorm, SwiGLU, rotary embedding, gates."""

import torch

from tidegate._contracts import LAYOUTS
from tidegate.fallback.checks import activation as parse_activation
from tidegate.fallback.checks import choice, finite, refuse, wide


def l2norm_fwd(x, eps=1e-6, out_dtype=None):
    finite("l2norm_fwd", "eps", eps, 0)
    xw = x.to(wide(x))
    rstd = (xw.square().sum(-1) + eps).rsqrt()
    return (xw * rstd[..., None]).to(out_dtype or x.dtype), rstd


def l2norm_bwd(dy, x, rstd, zero_row_safe=False):
    xw, scale = x.to(rstd.dtype), rstd[..., None]
    y, dy = xw * scale, dy.to(rstd.dtype)
    dx = scale * (dy - y * (dy * y).sum(-1, keepdim=True))
    if zero_row_safe:
        dx = dx.masked_fill((x == 0).all(-1, keepdim=True), 0)
    return dx.to(x.dtype)


def _normalised(x, eps):
    xw = x.to(wide(x))
    rstd = (xw.square().mean(-1) + eps).rsqrt()
    return xw * rstd[..., None], rstd


def _norm_gradient(dn, n, rstd):
    """From the gradient of the normalised rows n to that of the rows."""
    return rstd[..., None] * (dn - n * (dn * n).mean(-1, keepdim=True))


def rms_norm_fwd(x, weight, eps=1e-6):
    finite("rms_norm_fwd", "eps", eps, 0)
    n, rstd = _normalised(x, eps)
    return (n * (1 + weight.to(n.dtype))).to(x.dtype), rstd


def rms_norm_bwd(dy, x, weight, rstd):
    n, dy = x.to(rstd.dtype) * rstd[..., None], dy.to(rstd.dtype)
    dx = _norm_gradient(dy * (1 + weight.to(n.dtype)), n, rstd)
    return dx.to(x.dtype), (dy * n).flatten(0, -2).sum(0)


def _gate(z, activation):
    """The gate and its slope."""
    s = torch.sigmoid(z)
    return (s, s * (1 - s)) if activation == "sigmoid" else (z * s, s * (1 + z * (1 - s)))


def rms_norm_gated_fwd(x, z, weight, eps=1e-6, activation="silu", rounding="hf", out_memory=None):
    op = "rms_norm_gated_fwd"
    finite(op, "eps", eps, 0)
    activation = parse_activation(op, activation, conv=False)
    choice(op, "rounding", rounding, "hf or fp32")
    if out_memory is not None:
        choice(op, "out_memory", out_memory, "same or swapped")
    n, rstd = _normalised(x, eps)
    y = n.to(x.dtype).to(n.dtype) if rounding == "hf" else n
    if weight is not None:
        y = y * weight.to(n.dtype)
        if rounding == "hf" and torch.promote_types(weight.dtype, x.dtype) == x.dtype:
            y = y.to(x.dtype).to(n.dtype)
    y = (y * _gate(z.to(n.dtype), activation)[0]).to(x.dtype)
    if out_memory == "swapped":
        y = y.transpose(-3, -2).contiguous().transpose(-3, -2)
    return y, rstd


def rms_norm_gated_bwd(dy, x, z, weight, rstd, activation="silu", rounding="hf"):
    op = "rms_norm_gated_bwd"
    activation = parse_activation(op, activation, conv=False)
    choice(op, "rounding", rounding, "hf or fp32")
    n, dy = x.to(rstd.dtype) * rstd[..., None], dy.to(rstd.dtype)
    gate, slope = _gate(z.to(n.dtype), activation)
    dyw = dy if weight is None else dy * weight.to(n.dtype)
    dweight = n.new_empty(0) if weight is None else (dy * n * gate).flatten(0, -2).sum(0)
    return _norm_gradient(dyw * gate, n, rstd).to(x.dtype), (dyw * n * slope).to(x.dtype), dweight


def _rotate(op, x, cos, sin, layout, rounding, back):
    choice(op, "rounding", rounding, "hf or fp32")
    dim = -2 if LAYOUTS[layout].endswith("T,H") else -3
    cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
    R, dtype = cos.shape[-1], x.dtype
    head, rest = x[..., :R], x[..., R:]
    if rounding == "fp32":  # otherwise products and sum round, as they do in a model
        head, cos, sin = (t.to(wide(x)) for t in (head, cos, sin))
    if back:
        first, second = (head * sin).chunk(2, -1)
        turned = torch.cat([second, -first], -1)
    else:
        first, second = head.chunk(2, -1)
        turned = torch.cat([-second, first], -1) * sin
    return torch.cat([(head * cos + turned).to(dtype), rest], -1)


def partial_rope_fwd(x, cos, sin, layout="BNSD", rounding="hf"):
    return _rotate("partial_rope_fwd", x, cos, sin, layout, rounding, back=False)


def partial_rope_bwd(dy, cos, sin, layout="BNSD", rounding="hf"):
    return _rotate("partial_rope_bwd", dy, cos, sin, layout, rounding, back=True)


def mrope_cos_sin(position_ids, inv_freq, section, scaling=1.0, dtype=torch.float32):
    op = "mrope_cos_sin"
    if len(section) != 3:
        refuse(op, "section", "3 entries", len(section))
    for i, size in enumerate(section):
        if size < 0:
            refuse(op, f"section[{i}]", ">= 0", size)
    axes = [0] * len(inv_freq)
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = [axis] * len(axes[axis : 3 * section[axis] : 3])
    rows = position_ids.float().expand(3, *position_ids.shape[-2:])
    angle = (rows[axes].movedim(0, -1) * inv_freq).double()  # the product is one of fp32, as in models
    angle = torch.cat([angle, angle], -1)
    return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)


def log_decay(a, A_log, dt_bias):
    """-exp(A_log) softplus(a + dt_bias) over heads in the last dimension. A closed gate is 0 whatever its rate."""
    x = a if dt_bias is None else a + dt_bias.to(a.dtype)
    rate = A_log.to(a.dtype).exp()
    open_ = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    closed = (open_ == 0) & rate.isinf()
    # An infinite rate passes no gradient, neither to a nor to A_log.
    product = torch.where(rate.isinf(), rate.detach() * open_.detach(), rate * open_)
    return -product.masked_fill(closed, 0)


def _heads_last(x, layout):
    return x if LAYOUTS[layout].endswith("T,H") else x.transpose(-1, -2)


def gdn_gating_fwd(a, b, A_log, dt_bias=None, beta_scale=1.0, beta_dtype=None, layout="BSND"):
    finite("gdn_gating_fwd", "beta_scale", beta_scale)
    g = log_decay(_heads_last(a.to(wide(a)), layout), A_log, dt_bias)
    beta = beta_scale * torch.sigmoid(b.to(wide(b)))
    return _heads_last(g, layout), beta.to(beta_dtype or b.dtype)


def gdn_gating_bwd(dg, dbeta, a, b, A_log, dt_bias=None, beta_scale=1.0, layout="BSND"):
    finite("gdn_gating_bwd", "beta_scale", beta_scale)
    x = _heads_last(a.to(wide(a)), layout)
    dg, rate = _heads_last(dg, layout), A_log.to(x.dtype).exp()
    decay = log_decay(x, A_log, dt_bias)
    x = x if dt_bias is None else x + dt_bias.to(x.dtype)
    da = torch.where(rate.isinf(), 0, -dg * rate * torch.sigmoid(x))
    # Over all tokens: the one long sum of this operator, in fp64 as in the native library.
    dA_log = torch.where(decay.isinf() | rate.isinf(), 0, dg * decay).double().flatten(0, -2).sum(0)
    ddt_bias = da.double().flatten(0, -2).sum(0)
    s = torch.sigmoid(b.to(wide(b)))
    db = dbeta.to(s.dtype) * beta_scale * s * (1 - s)
    ddt_bias = ddt_bias.to(x.dtype) if dt_bias is not None else x.new_empty(0)
    return _heads_last(da, layout).to(a.dtype), db.to(b.dtype), dA_log.to(x.dtype), ddt_bias


def swiglu_fwd(gate, up):
    value, _ = _gate(gate.to(wide(gate)), "silu")
    return (value * up.to(value.dtype)).to(gate.dtype)


def swiglu_bwd(dy, gate, up):
    value, slope = _gate(gate.to(wide(gate)), "silu")
    dy = dy.to(value.dtype)
    return (dy * up.to(value.dtype) * slope).to(gate.dtype), (dy * value).to(gate.dtype)

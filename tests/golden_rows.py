"""RMSNorm and rotary position embedding; see golden.py.

x [..., D], rstd [...].
"""

import torch


# --- RMSNorm ---------------------------------------------------------------------------------------------------------
def _gate_act(z, activation):
    return torch.sigmoid(z) if activation == "sigmoid" else z * torch.sigmoid(z)


def rms_norm_gated_fwd(x, z, weight, eps=1e-6, activation="silu"):
    """y = weight * x / sqrt(mean x^2 + eps) * act(z), norm before gate, no intermediate rounding. Returns y, rstd."""
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return weight * x * rstd[..., None] * _gate_act(z, activation), rstd


def rms_norm_gated_bwd(x, z, weight, rstd, dy, activation="silu"):
    """Gradients dx, dz, dweight (summed over all rows)."""
    s, xh, act = torch.sigmoid(z), x * rstd[..., None], _gate_act(z, activation)
    dact = s * (1 - s) if activation == "sigmoid" else s * (1 + z * (1 - s))
    dxh = dy * weight * act
    dx = rstd[..., None] * (dxh - xh * (dxh * xh).mean(-1, keepdim=True))
    return dx, dy * weight * xh * dact, (dy * xh * act).reshape(-1, x.shape[-1]).sum(0)


def rms_norm_gated_hf(x, z, weight, eps=1e-6, activation="silu"):
    """Rounding order of Transformers for x of a 16-bit type: normalise in fp32, round to x.dtype, multiply by weight in
    the promoted type of (weight, x) and round there, multiply by act(z) in fp32, round to x.dtype."""
    xf = x.float()
    xh = (xf * (xf.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
    wide = torch.promote_types(weight.dtype, x.dtype)
    wx = (weight.float() * xh.float()).to(wide)
    return (wx.float() * _gate_act(z.float(), activation)).to(x.dtype)


def rms_norm_fwd(x, weight, eps=1e-6):
    """Zero-centred: y = x / sqrt(mean x^2 + eps) * (1 + weight). Returns y, rstd."""
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return x * rstd[..., None] * (1 + weight), rstd


def rms_norm_bwd(x, weight, rstd, dy):
    """Gradients dx, dweight (summed over all rows)."""
    xh = x * rstd[..., None]
    dxh = dy * (1 + weight)
    dx = rstd[..., None] * (dxh - xh * (dxh * xh).mean(-1, keepdim=True))
    return dx, (dy * xh).reshape(-1, x.shape[-1]).sum(0)


# --- rotary position embedding ---------------------------------------------------------------------------------------
def mrope_axis(half_dim, section):
    """Which position axis (0 time, 1 height, 2 width) drives frequency i in the interleaved layout."""
    return [
        1 if i % 3 == 1 and i < 3 * section[1] else 2 if i % 3 == 2 and i < 3 * section[2] else 0
        for i in range(half_dim)
    ]


def mrope_cos_sin(pos, inv_freq, section):
    """pos [3, ..., T] -> cos, sin [..., T, 2 * half], both halves equal. The angle is an fp32 product, as in models."""
    axis = mrope_axis(inv_freq.shape[0], section)
    angle = (pos.float()[axis].movedim(0, -1) * inv_freq.float()).double()
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def partial_rope_fwd(x, cos, sin):
    """x [..., T, D]: rotate pairs (i, i + R/2) of the first R = cos.shape[-1] channels, pass the rest."""
    R = cos.shape[-1]
    x1, x2 = x[..., : R // 2], x[..., R // 2 : R]
    (c1, c2), (s1, s2) = cos.chunk(2, -1), sin.chunk(2, -1)
    return torch.cat([x1 * c1 - x2 * s1, x2 * c2 + x1 * s2, x[..., R:]], -1)


def partial_rope_bwd(dy, cos, sin):
    """Transpose of the rotation."""
    R = cos.shape[-1]
    d1, d2 = dy[..., : R // 2], dy[..., R // 2 : R]
    (c1, c2), (s1, s2) = cos.chunk(2, -1), sin.chunk(2, -1)
    return torch.cat([d1 * c1 + d2 * s2, d2 * c2 - d1 * s1, dy[..., R:]], -1)

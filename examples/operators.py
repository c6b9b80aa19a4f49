"""The operators of one Qwen3.5-9B linear-attention layer on a 2048-token prompt: time, error, ratio to stock PyTorch.

Both sides are timed in turns on the same inputs; errors are relative rms against the same formula in fp64.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import tidegate
from tidegate import fla

HK, HV, K, V, W = 16, 32, 128, 128, 4  # key heads, value heads, head sizes, conv taps
D = 2 * HK * K + HV * V  # conv channels


def stock_conv(x, weight):
    y = F.conv1d(x.transpose(1, 2), weight[:, None], padding=W - 1, groups=weight.shape[0])[..., : x.shape[1]]
    return F.silu(y).transpose(1, 2)


def stock_gates(a, b, A_log, dt_bias):
    return -A_log.to(torch.promote_types(a.dtype, torch.float32)).exp() * F.softplus(
        a.to(torch.promote_types(a.dtype, torch.float32)) + dt_bias
    ), b.sigmoid()


def stock_l2norm(x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def stock_norm(x, z, weight):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    n = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return ((weight * n.to(x.dtype)) * F.silu(z.to(wide.dtype))).to(x.dtype)


def stock_delta_rule(q, k, v, g, beta, C=64):
    """The chunk form in torch operators, one chunk after the other, fp32 inside."""
    kind = torch.promote_types(q.dtype, torch.float32)
    group = v.shape[2] // q.shape[2]
    q, k = (t.repeat_interleave(group, 2) for t in (q, k))
    dtype = v.dtype
    q, k, v, g, beta = (t.to(kind).transpose(1, 2) for t in (q, k, v, g, beta))
    S = q.new_zeros(*v.shape[:2], q.shape[-1], v.shape[-1])
    out = []
    for t in range(0, v.shape[2], C):
        Q, X, values, gc, b = (x[:, :, t : t + C] for x in (q, k, v, g.unsqueeze(-1), beta.unsqueeze(-1)))
        gc = gc.cumsum(2)
        gamma = (gc - gc.mT).tril().exp().tril()
        A = (b * gamma * (X @ X.mT)).tril(-1)
        new = torch.linalg.solve_triangular(A, b * (values - gc.exp() * (X @ S)), upper=False, unitriangular=True)
        out.append(q.shape[-1] ** -0.5 * (gc.exp() * (Q @ S) + (gamma * (Q @ X.mT)) @ new))
        last = gc[:, :, -1:]
        S = last.exp() * S + ((last - gc).exp() * X).mT @ new
    return torch.cat(out, 2).transpose(1, 2).to(dtype)


def stock_rope(q, cos, sin):
    R = cos.shape[-1]
    rot, rest = q[..., :R], q[..., R:]
    half = torch.cat((-rot[..., R // 2 :], rot[..., : R // 2]), -1)
    return torch.cat((rot * cos + half * sin, rest), -1)


def with_backward(f):
    """The same computation and the gradient of its sum."""

    def run(*inputs):
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = f(*leaves)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        return leaves[0].grad

    return run


def cases(T):
    def randn(*shape, scale=1.0):
        return (scale * torch.randn(*shape)).bfloat16()

    x, weight = randn(1, T, D), randn(D, W, scale=0.5)
    a, b, A_log, dt_bias = randn(1, T, HV), randn(1, T, HV), torch.rand(HV) * 2, torch.randn(HV)
    q, z, norm = randn(1, T, HV, V), randn(1, T, HV, V), randn(V)
    rq, cos, sin = randn(1, 16, T, 256), randn(T, 64), randn(T, 64)

    key, query = (F.normalize(torch.randn(1, T, HK, K), dim=-1).bfloat16() for _ in range(2))
    rule = (query, key, randn(1, T, HV, V), -0.1 * torch.rand(1, T, HV), torch.rand(1, T, HV).bfloat16())

    def conv(x, w):
        return fla.causal_conv1d(x, w, activation="silu")[0]

    return [
        ("causal_conv1d + SiLU", f"[1,{T},{D}]", (x, weight), conv, stock_conv),
        ("  with backward", "", (x, weight), with_backward(conv), with_backward(stock_conv)),
        ("gates", f"[1,{T},{HV}]", (a, b, A_log, dt_bias), lambda *t: tidegate.ops.gdn_gating_fwd(*t), stock_gates),
        ("l2norm", f"[1,{T},{HV},{K}]", (q,), fla.l2norm, stock_l2norm),
        ("gated delta rule", f"[1,{T},{HV},{V}]", rule, lambda *t: fla.chunk_gated_delta_rule(*t)[0], stock_delta_rule),
        ("gated RMSNorm", f"[1,{T},{HV},{V}]", (q, z, norm), tidegate.rms_norm_gated, stock_norm),
        (
            "  with backward",
            "",
            (q, z, norm),
            with_backward(tidegate.rms_norm_gated),
            with_backward(stock_norm),
        ),
        ("partial RoPE", f"[1,16,{T},256]", (rq, cos, sin), lambda *t: tidegate.ops.partial_rope_fwd(*t), stock_rope),
    ]


def first(result):
    return result[0] if isinstance(result, tuple) else result


def error(result, truth):
    return ((first(result).double() - first(truth)).norm() / first(truth).norm()).item()


def interleaved(ours, stock, inputs, seconds):
    """Median times of both, run in turns."""
    times = ([], [])
    for f in (ours, stock):
        f(*inputs)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 3:
        for f, record in zip((ours, stock), times, strict=True):
            start = time.perf_counter()
            f(*inputs)
            record.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="prompt length (default 2048)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each line (default 2)")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(tidegate.report(), "\n")
    print(
        f"{'operator (bf16)':<22}{'shape':<18}{'tidegate':>11}{'PyTorch':>11}{'ratio':>8}{'error':>10}{'PyTorch':>10}"
    )
    for name, shape, inputs, ours, stock in cases(args.tokens):
        truth = stock(*(t.double() for t in inputs))
        e_ours, e_stock = error(ours(*inputs), truth), error(stock(*inputs), truth)
        t_ours, t_stock = interleaved(ours, stock, inputs, args.seconds)
        print(
            f"{name:<22}{shape:<18}{t_ours * 1e3:>8.2f} ms{t_stock * 1e3:>8.2f} ms{t_stock / t_ours:>7.1f}x"
            f"{e_ours:>10.1e}{e_stock:>10.1e}"
        )


if __name__ == "__main__":
    main()

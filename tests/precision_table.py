"""Measures the error of every operator against fp64 and prints the table of docs/precision.md.

usage: python tests/precision_table.py
"""

import golden
import golden_moe
import torch
from compare import error

import tidegate
from tidegate import ops

T, D, W, HV, V = 2048, 512, 4, 32, 128
TYPES = (torch.float32, torch.bfloat16, torch.float16)
CU = [0, 1, 66, 66, 700, T]

# Bounds on the relative rms error: fp32 results, bf16 results. Rounding an exact result to bf16 alone costs 1.66e-3.
BOUNDS = {
    "causal_conv1d": ("2e-7, gradients 5e-7", "1.8e-3"),
    "gdn_gating": ("3e-7, gradients 1e-6", "beta 1.8e-3"),
    "l2norm": ("3e-7", "1.8e-3"),
    "chunk_gated_delta_rule": ("1e-6, gradients 3e-6", "1.8e-3, state 1e-6"),
    "recurrent_gated_delta_rule": ("5e-7, state 1e-6", "1.8e-3, state 1e-6"),
    "rms_norm_gated fp32": ("3e-7", "1.8e-3"),
    "rms_norm": ("3e-7", "1.8e-3"),
    "swiglu": ("3e-7", "1.8e-3"),
    "partial_rope fp32": ("2e-7", "1.8e-3"),
    "moe_route": ("1e-6", "1.8e-3"),
    "grouped_matmul": ("1e-6", "1.8e-3"),
    "moe_experts": ("1e-6, gradients 2e-6", "2.6e-3, gradients 3.2e-3"),
}


def pair(names, results, truths):
    return {n: error(r, t) for n, r, t in zip(names, results, truths, strict=True)}


def conv(dtype, rand):
    x, w, b, h0 = rand(T, D), rand(D, W), rand(D), rand(len(CU) - 1, D, W)
    dy, dht = rand(T, D), rand(len(CU) - 1, D, W)
    cu = torch.tensor(CU)
    kw = dict(cu_seqlens=cu, activation="silu", layout="TND")
    y = ops.causal_conv1d_fwd(x, w, b, h0, **kw)[0]
    grads = ops.causal_conv1d_bwd(dy, x, w, b, h0, dht, **kw)
    x, w, b, h0, dy, dht = (t.double() for t in (x, w, b, h0, dy, dht))
    truth = golden.causal_conv1d_fwd(x, w, b, CU, h0)[0]
    wanted = golden.causal_conv1d_bwd(x, w, dy, b, CU, h0, dht)
    return pair(("y", "dx", "dweight", "dbias", "dstate"), (y, *grads), (truth, *wanted))


def gating(dtype, rand):
    a, b, A_log, bias = rand(T, HV), rand(T, HV), torch.rand(HV), torch.randn(HV)
    g, beta = ops.gdn_gating_fwd(a, b, A_log, bias, layout="TND")
    dg, dbeta = torch.randn(T, HV), rand(T, HV)
    grads = ops.gdn_gating_bwd(dg, dbeta, a, b, A_log, bias, layout="TND")
    a, b, A_log, bias, dg, dbeta = (t.double() for t in (a, b, A_log, bias, dg, dbeta))
    truth = golden.gdn_gating_fwd(a.T, b.T, A_log, bias)
    wanted = golden.gdn_gating_bwd(a.T, b.T, A_log, dg.T, dbeta.T, bias)
    turned = (*(t.T for t in truth), wanted[0].T, wanted[1].T, *wanted[2:])
    return pair(("g", "beta", "da", "db", "dA_log", "ddt_bias"), (g, beta, *grads), turned)


def l2norm(dtype, rand):
    x, dy = rand(T, V), rand(T, V)
    y, rstd = ops.l2norm_fwd(x)
    dx = ops.l2norm_bwd(dy, x, rstd)
    truth, r = golden.l2norm_fwd(x.double())
    return pair(("y", "dx"), (y, dx), (truth, golden.l2norm_bwd(x.double(), r, dy.double())))


def swiglu(dtype, rand):
    gate, up, dy = rand(T, V), rand(T, V), rand(T, V)
    wide = [t.double().requires_grad_() for t in (gate, up)]
    truth = torch.nn.functional.silu(wide[0]) * wide[1]
    grads = torch.autograd.grad(truth, wide, dy.double())
    return pair(
        ("y", "dgate", "dup"),
        (ops.swiglu_fwd(gate, up), *ops.swiglu_bwd(dy, gate, up)),
        (truth.detach(), *grads),
    )


def rule_inputs(dtype, rand, tokens, count):
    """q, k, v, g, beta and states. Half of the heads forget slowly, so that the state matters over many tokens."""
    H, K = 4, 128
    q, k = (torch.nn.functional.normalize(torch.randn(H // 2, tokens, K), dim=-1).to(dtype) for _ in range(2))
    v, beta, h0 = rand(H, tokens, V), torch.rand(H, tokens).to(dtype), torch.randn(count, H, K, V)
    g = -torch.tensor([0.005, 0.005, 0.5, 2.0])[:, None] * torch.rand(H, tokens)
    return [q, k, v, g, beta], h0


def delta_rule(dtype, rand):
    cu = [0, 1, 66, 66, 300, 768]
    inputs, h0 = rule_inputs(dtype, rand, 768, len(cu) - 1)
    args = dict(cu_seqlens=torch.tensor(cu), output_final_state=True, layout="NTD")
    leaves = [t.requires_grad_() for t in (*inputs, h0)]
    o, state, _ = ops.chunk_gated_delta_rule_fwd(*leaves, **args)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    truth = golden.gated_delta_rule(*wide[:5], cu, wide[5], V**-0.5)
    do, dstate = rand(*o.shape), torch.randn_like(state)
    grads = torch.autograd.grad((o, state), leaves, (do, dstate))
    true_grads = torch.autograd.grad(truth, wide, (do.double(), dstate.double()))
    names = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
    return pair(names, (o.detach(), state.detach(), *grads), (truth[0].detach(), truth[1].detach(), *true_grads))


def recurrence(dtype, rand):
    """512 steps of one token."""
    inputs, h0 = rule_inputs(dtype, rand, 512, 1)
    pool, slot = h0.clone(), torch.tensor([0])
    steps = ([t[:, i : i + 1] for t in inputs] for i in range(512))
    o = torch.cat([ops.recurrent_gated_delta_rule(*x, pool, state_indices=slot, layout="NTD") for x in steps], 1)
    truth = golden.gated_delta_rule(*(t.double() for t in inputs), [0, 512], h0.double(), V**-0.5)
    return pair(("o", "state"), (o, pool), truth)


def gated(rounding):
    def run(dtype, rand):
        x, z, w, dy = rand(T, V), rand(T, V), rand(V), rand(T, V)
        y, rstd = ops.rms_norm_gated_fwd(x, z, w, rounding=rounding)
        grads = ops.rms_norm_gated_bwd(dy, x, z, w, rstd, rounding=rounding)
        x, z, w, dy = (t.double() for t in (x, z, w, dy))
        truth, r = golden.rms_norm_gated_fwd(x, z, w)
        return pair(("y", "dx", "dz", "dweight"), (y, *grads), (truth, *golden.rms_norm_gated_bwd(x, z, w, r, dy)))

    return run


def rms_norm(dtype, rand):
    x, w, dy = rand(T, V), rand(V), rand(T, V)
    y, rstd = ops.rms_norm_fwd(x, w)
    grads = ops.rms_norm_bwd(dy, x, w, rstd)
    x, w, dy = (t.double() for t in (x, w, dy))
    truth, r = golden.rms_norm_fwd(x, w)
    return pair(("y", "dx", "dweight"), (y, *grads), (truth, *golden.rms_norm_bwd(x, w, r, dy)))


def rope(rounding):
    def run(dtype, rand):
        x, angle = rand(4, T, 256), torch.rand(T, 32) * 6.3
        cos, sin = (torch.cat((f(angle),) * 2, -1).to(dtype) for f in (torch.cos, torch.sin))
        y = ops.partial_rope_fwd(x, cos, sin, layout="NTD", rounding=rounding)
        return pair(("y",), (y,), (golden.partial_rope_fwd(x.double(), cos.double(), sin.double()),))

    return run


def graded(call, exact, inputs, dy, names):
    """Results and gradients of two functions of the same inputs."""
    found = []
    for function, tensors in ((call, inputs), (exact, [t.double() for t in inputs])):
        tensors = [t.detach().clone().requires_grad_() for t in tensors]
        y = function(*tensors)
        found.append([y.detach(), *torch.autograd.grad(y, tensors, dy.to(y.dtype))])
    return pair(names, *found)


def route(dtype, rand):
    logits, dw = rand(T, 256), rand(T, 8)
    ids, _ = tidegate.moe_route(logits, 8)

    def exact(z):
        p = z.softmax(-1).gather(1, ids.long())
        return p / p.sum(-1, keepdim=True)

    return graded(lambda z: tidegate.moe_route(z, 8)[1], exact, [logits], dw, ("weights", "dlogits"))


def product(dtype, rand):
    counts = torch.tensor([100, 0, 3, 153])
    inputs = [rand(256, 512), rand(4, 96, 512) / 20, rand(4, 96)]
    call = lambda x, w, b: tidegate.grouped_matmul(x, w, counts, b)  # noqa: E731
    exact = lambda x, w, b: golden_moe.grouped_matmul(x, w, counts, b)  # noqa: E731
    return graded(call, exact, inputs, rand(256, 96), ("y", "dx", "dweight", "dbias"))


def experts(dtype, rand):
    E, H, inner, r = 8, 256, 128, 8
    ids = torch.stack([torch.randperm(E)[:2] for _ in range(128)])
    inputs = [rand(128, H), torch.rand(128, 2), rand(E, 2 * inner, H) / 16, rand(E, H, inner) / 11]
    inputs += [rand(E, r, H) / 16, rand(E, 2 * inner, r) / 6, rand(E, r, inner) / 11, rand(E, H, r) / 6]

    def call(x, w, gate_up, down, a, b, c, d):
        return tidegate.moe_experts(x, ids, w, gate_up, down, gate_up_lora=(a, b, 0.5), down_lora=(c, d, 0.5))

    def exact(x, w, gate_up, down, a, b, c, d):
        return golden_moe.experts(x, ids, w, gate_up + 0.5 * (b @ a), down + 0.5 * (d @ c))

    names = ("out", "dx", "dweights", "dgate_up", "ddown", "da", "db", "da (down)", "db (down)")
    return graded(call, exact, inputs, rand(128, H), names)


CASES = {
    "causal_conv1d": conv,
    "gdn_gating": gating,
    "l2norm": l2norm,
    "chunk_gated_delta_rule": delta_rule,
    "recurrent_gated_delta_rule": recurrence,
    "rms_norm_gated fp32": gated("fp32"),
    "rms_norm_gated hf": gated("hf"),
    "rms_norm": rms_norm,
    "swiglu": swiglu,
    "partial_rope fp32": rope("fp32"),
    "partial_rope hf": rope("hf"),
    "moe_route": route,
    "grouped_matmul": product,
    "moe_experts": experts,
}


def main():
    print(f"Measured with tidegate {tidegate.__version__} on `{tidegate.isa()}`, relative rms error against fp64.\n")
    print("| operator | bound fp32 / bf16 | fp32 | bf16 | fp16 |\n|---|---|---|---|---|")
    for name, case in CASES.items():
        cells = []
        for dtype in TYPES:
            torch.manual_seed(0)
            errors = case(dtype, lambda *shape, dtype=dtype: torch.randn(*shape).to(dtype))
            cells.append("<br>".join(f"{key} {value:.1e}" for key, value in errors.items()))
        bound = " / ".join(BOUNDS.get(name, ("as Transformers",)))
        print(f"| {name} | {bound} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

"""Problems that are computed twice, by the native library and, in a process without it, by plain torch.

python fallback_case.py <file>      writes what this process computes
"""

import sys

import golden
import torch
from compare import leaves
from delta_rule_case import INPUTS, cut, make

import tidegate

LENGTHS = (0, 1, 2, 3, 4, 63, 64, 65, 127, 128, 129)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONV = [(activation, bias) for activation in (None, "silu") for bias in (False, True)]


def splits():
    """Three packed batches; the last has as many tokens as channels."""
    random = torch.Generator().manual_seed(5)
    order = [[LENGTHS[i] for i in torch.randperm(len(LENGTHS), generator=random)] for _ in range(2)]
    return [tuple(order[0][:6]), tuple(order[1][:7]), (1, 0, 63)]


def conv_problem(lengths, bias, dtype, channels=64):
    random = torch.Generator().manual_seed(7)
    shapes = {"x": (sum(lengths), channels), "weight": (channels, 4), "bias": (channels,)}
    shapes |= {"state": (len(lengths), channels, 3), "dy": shapes["x"], "dfinal": (len(lengths), channels, 3)}
    p = {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}
    p["weight"], p["bias"] = p["weight"].float(), p["bias"].float() if bias else None
    return p | {"cu": golden.cu_from_lengths(lengths)}


def conv_parts(p):
    """Every sequence of a problem as a problem of its own."""
    for n, (a, b) in enumerate(zip(p["cu"], p["cu"][1:], strict=False)):
        part = {name: p[name][a:b] for name in ("x", "dy")} | {name: p[name][n : n + 1] for name in ("state", "dfinal")}
        yield {**p, **part, "cu": [0, b - a]}


def run_conv(p, activation):
    x, weight, bias, state = leaves(*(p[name] for name in ("x", "weight", "bias", "state")))
    options = {"activation": activation, "output_final_state": True, "layout": "TND"}
    y, final = tidegate.ops.causal_conv1d_fwd(x, weight, bias, state, cu_seqlens=torch.tensor(p["cu"]), **options)
    torch.autograd.backward([y, final], [p["dy"], p["dfinal"]])
    results = {"y": y.detach(), "final": final.detach(), "dx": x.grad, "dweight": weight.grad, "dstate": state.grad}
    return results | ({} if bias is None else {"dbias": bias.grad})


def conv_truth(p, activation):
    wide = {name: None if value is None else value.double() for name, value in p.items() if name != "cu"}
    y, _, final = golden.causal_conv1d_fwd(wide["x"], wide["weight"], wide["bias"], p["cu"], wide["state"], activation)
    gradients = golden.causal_conv1d_bwd(
        wide["x"], wide["weight"], wide["dy"], wide["bias"], p["cu"], wide["state"], wide["dfinal"], activation
    )
    found = dict(zip(("dx", "dweight", "dbias", "dstate"), gradients, strict=True)) | {"y": y, "final": final}
    return {name: value for name, value in found.items() if name != "dbias" or p["bias"] is not None}


def rule_problem(lengths, dtype):
    return make(lengths, HK=2, G=2, K=20, V=24, dtype=dtype, seed=3)


def rule_gradients(p):
    random = torch.Generator().manual_seed(11)
    return torch.randn(p["v"].shape, generator=random), torch.randn(p["h0"].shape, generator=random)


def run_rule(p, gradients=None, options=()):
    """o, final states and all gradients, head-major as in golden.py."""
    do, dfinal = gradients or rule_gradients(p)
    inputs = {name: p[name].clone().requires_grad_() for name in (*INPUTS, "h0")}
    o, final, _ = tidegate.ops.chunk_gated_delta_rule_fwd(
        *inputs.values(), cu_seqlens=torch.tensor(p["cu"]), output_final_state=True, layout="NTD", **dict(options)
    )
    torch.autograd.backward([o, final], [do.to(o.dtype), dfinal])
    return {"o": o.detach(), "final": final.detach()} | {f"d{name}": x.grad for name, x in inputs.items()}


def rule_truth(p):
    do, dfinal = rule_gradients(p)
    wide = {name: p[name].double().requires_grad_() for name in (*INPUTS, "h0")}
    o, final = golden.gated_delta_rule(*(wide[name] for name in INPUTS), p["cu"], wide["h0"], p["k"].shape[-1] ** -0.5)
    torch.autograd.backward([o, final], [do.to(p["v"].dtype).double(), dfinal.double()])
    return {"o": o.detach(), "final": final.detach()} | {f"d{name}": x.grad for name, x in wide.items()}


OPTIONS = {"use_qk_l2norm": True, "beta_sigmoid": True, "beta_scale": 2.0}


def compute():
    """Everything, by name."""
    found = {}
    for i, lengths in enumerate(splits()):
        for kind, dtype in DTYPES.items():
            for activation, bias in CONV:
                p = conv_problem(lengths, bias, dtype)
                found["conv", i, kind, activation, bias] = run_conv(p, activation)
            p = rule_problem(lengths, dtype)
            found["rule", i, kind] = run_rule(p)
            found["rule with options", i, kind] = run_rule(p, options=OPTIONS.items())
        p = conv_problem(lengths, True, torch.float32)
        parts = [run_conv(part, "silu") for part in conv_parts(p)]
        summed = {name: sum(part[name] for part in parts) for name in ("dweight", "dbias")}
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name not in summed}
        found["separate conv", i] = joined | summed
        p, parts = rule_problem(lengths, torch.float32), []
        do, dfinal = rule_gradients(p)
        for n, (a, b) in enumerate(zip(p["cu"], p["cu"][1:], strict=False)):
            parts.append(run_rule(cut(p, n), (do[:, a:b], dfinal[n : n + 1])))
        found["separate rule", i] = {
            name: torch.cat([part[name] for part in parts], 0 if name in ("final", "dh0") else 1) for name in parts[0]
        }
    return found


if __name__ == "__main__":
    torch.save(compute(), sys.argv[1])

"""What the engines without grouped heads and without packed input share: q, k repeated, one call a sequence."""

import torch

from engines import Run


def repeated(x, HV):
    """q and k as Transformers' layer passes them: repeated to the value heads."""
    return [x[n].repeat_interleave(HV // x[n].shape[2], 2) for n in ("q", "k")]


def per_sequence(item, x, rule, note=""):
    """rule(q, k, v, g, beta) -> (o, S) on every sequence of a packed item; a dense batch goes in one call."""
    q, k = repeated(x, item.sizes["HV"])
    rest = [x[n] for n in ("v", "g", "beta")]
    if "lengths" not in item.sizes:
        return Run(lambda: rule(q, k, *rest), lambda r: {"o": r[0], "S": r[1]}, note)
    parts = [[t[:, b:e] for t in (q, k, *rest)] for b, e in item.spans]

    def outputs(results):
        return {"o": torch.cat([o for o, _ in results], 1), "S": torch.cat([s for _, s in results])}

    return Run(lambda: [rule(*p) for p in parts], outputs, ", ".join(n for n in (note, "one call a sequence") if n))


def forward_backward(item, x, rule, grouped=False):
    """Forward and autograd's backward of rule(q, k, v, g, beta) -> o. The repetition is part of it, as in the layer; an
    engine with grouped heads has none."""
    leaves = {n: x[n].detach().clone().requires_grad_() for n in ("q", "k", "v", "g", "beta")}

    def call():
        with torch.enable_grad():
            q, k = (leaves["q"], leaves["k"]) if grouped else repeated(leaves, item.sizes["HV"])
            o = rule(q, k, leaves["v"], leaves["g"], leaves["beta"])
            return torch.autograd.grad(o, list(leaves.values()), x["do"].to(o.dtype))

    return Run(call, lambda grads: {f"d{n}": t for n, t in zip(leaves, grads, strict=True)})

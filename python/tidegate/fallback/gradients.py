"""Gradients of plain torch code inside a kernel, where torch has switched autograd off."""

import torch

_KEYS = [getattr(torch._C.DispatchKey, name) for name in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView")]


def _with_autograd():
    """The dispatcher as it is outside of a kernel."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _KEYS:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def pull_back(function, inputs, wanted, gradients):
    """Gradients of the wanted inputs (None for the others) from those of the results (None: zero)."""
    with torch.inference_mode(False), _with_autograd(), torch.enable_grad():
        leaves = [None if x is None else x.detach().clone() for x in inputs]
        asked = [x.requires_grad_() for x, want in zip(leaves, wanted, strict=True) if want and x is not None]
        results = function(*leaves)
        pairs = [(y, dy) for y, dy in zip(results, gradients, strict=True) if dy is not None and y.requires_grad]
        found = [None] * len(asked)
        if pairs and asked:
            outputs, given = [y for y, _ in pairs], [dy.detach().clone().to(y.dtype) for y, dy in pairs]
            found = torch.autograd.grad(outputs, asked, given, allow_unused=True)
    found = iter(torch.zeros_like(x) if dx is None else dx for x, dx in zip(asked, found, strict=True))
    return [next(found) if want and x is not None else None for x, want in zip(leaves, wanted, strict=True)]

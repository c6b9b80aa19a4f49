"""Routers of a mixture of experts: ids that depend on neither batch nor threads, and their record and replay."""

import torch

from tidegate import _native
from tidegate.errors import SelfTestError
from tidegate.linear import linear
from tidegate.moe import moe_route
from tidegate.patch.code import argument_names
from tidegate.patch.resolve import is_sharded, named_modules, unreadable
from tidegate.patch.selftest import error
from tidegate.patch.site import ForwardSite, Site, call_original, foreign_forward
from tidegate.recorder import in_backward

OP = "router"
KNOWN = ("Qwen3_5MoeTopKRouter", "Qwen3NextTopKRouter", "Qwen4ExpTextTopKRouter")
TESTED_ROWS = 9


class RouterSite(ForwardSite):
    """`probabilities`: the first result is the softmax, and weights have its type (Transformers before 5.5)."""

    probabilities = False
    recorder = None  # a RouterRecorder while it records or replays
    replayed = None  # the last one that replayed, for layers that are computed again later


def _logits(site, rows, weight):
    """What is routed by. Probabilities are those of fp32 logits, in a model of fp64 too."""
    logits = linear(rows, weight)
    return logits.float() if site.probabilities and logits.dtype == torch.float64 else logits


def forward(self, hidden_states):
    site = self._tidegate.sites[OP]
    if hidden_states.dtype != self.weight.dtype or is_sharded(self.weight):
        return call_original(self, OP, hidden_states)  # autocast and sharding know what to do
    logits = _logits(site, hidden_states.reshape(-1, self.weight.shape[1]), self.weight)
    recorder = site.recorder
    if recorder is None and site.replayed is not None and in_backward():
        recorder = site.replayed
    ids, weights, *probabilities = moe_route(
        logits,
        self.top_k,
        renormalise=getattr(self, "norm_topk_prob", True),
        weights_dtype=torch.float32 if site.probabilities else None,
        replay_ids=None if recorder is None else recorder.chosen(site.path, logits, self.top_k),
        return_probs=site.probabilities,
    )
    if recorder is not None:
        recorder.keep(site.path, ids)
    return probabilities[0] if site.probabilities else logits, weights, ids.long()


def is_router(module):
    """A matrix [experts, channels], top_k, and a forward of hidden states alone."""
    weight, count = getattr(module, "weight", None), getattr(module, "num_experts", None)
    if not isinstance(getattr(module, "top_k", None), int) or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return False
    return weight.shape[0] == count and argument_names(type(module).forward) <= {
        "self",
        "hidden_states",
        "args",
        "kwargs",
    }


def _rows(module):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(TESTED_ROWS, module.weight.shape[1], generator=generator).to(module.weight.dtype)


def _readable(module):
    """The module, or one like it with random weights where its own cannot be read: what it returns is in its code."""
    if unreadable(module) is None:
        return module
    twin = type(module).__new__(type(module))
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(module.weight.shape, generator=generator).to(module.weight.dtype)
    twin.__dict__.update(module.__dict__, _parameters={"weight": torch.nn.Parameter(weight, requires_grad=False)})
    return twin


def _returns_probabilities(module):
    module = _readable(module)
    with torch.no_grad():
        first = type(module).forward(module, _rows(module))[0]
    return first.dtype == torch.float32 and bool(torch.allclose(first.sum(-1), torch.ones(TESTED_ROWS), atol=1e-4))


def _test(site):
    """Numbers as the original's; other experts only where its own numbers are as good as equal."""

    def test():
        module, x = site.module, _rows(site.module)
        with torch.no_grad():
            theirs = type(module).forward(module, x)
            logits = _logits(site, x, module.weight)
            options = dict(
                renormalise=getattr(module, "norm_topk_prob", True),
                weights_dtype=torch.float32 if site.probabilities else None,
                return_probs=True,
            )
            ids, _, probabilities = moe_route(logits, module.top_k, **options)
            _, weights, _ = moe_route(logits, module.top_k, replay_ids=theirs[2], **options)
        first = probabilities if site.probabilities else logits
        # In fp64 too: the original's softmax is in fp32 whatever the model is in.
        limit = max(1e-5, 4 * torch.finfo(module.weight.dtype).eps)
        for name, ours, original in (("first result", first, theirs[0]), ("weights", weights, theirs[1])):
            if ours.shape != original.shape or ours.dtype != original.dtype or not error(ours, original) <= limit:
                raise SelfTestError(f"self-test: the router's {name} differ by more than {limit:.1e}, or in type")
        worst = theirs[0].float().gather(1, theirs[2]).amin(1) - theirs[0].float().gather(1, ids.long()).amin(1)
        if not bool((worst <= limit * theirs[0].float().abs().amax(1)).all()):
            raise SelfTestError("self-test: the router chooses other experts")
        return f"err {max(error(first, theirs[0]), error(weights, theirs[1])):.1e}"

    return test


def find(root, options):
    sites = []
    if _native.fallback:  # the model's own router is as fast there
        return sites
    for path, module in named_modules(root):
        if not is_router(module):
            continue
        other = foreign_forward(module)
        if other is not None:
            sites.append(Site(path, OP, module).refuse(f"forward already replaced by {other}"))
            continue
        site = RouterSite(path, OP, module, "I:route", forward, known=type(module).__name__ in KNOWN)
        try:
            site.probabilities = _returns_probabilities(module)
        except Exception as problem:  # another kind of module with such attributes
            sites.append(Site(path, OP, module).refuse(f"not a router: {type(problem).__name__}: {problem}"))
            continue
        site.test = _test(site)
        sites.append(site)
    return sites


find.ops = (OP,)

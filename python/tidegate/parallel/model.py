"""The forward of a whole model under sequence parallelism: cut the batch, run the shard, put the loss together."""

import inspect

import torch

from tidegate.parallel.whole import gather, total
from tidegate.patch.site import MISSING

OP = "sequence_parallel"
LOSS = ("labels", "shift_labels", "num_items_in_batch")


def _original(site, module, arguments):
    """What the module did before: our forward of packed input if it is a text model, or its class's own."""
    before = site.before.get("forward", MISSING)
    return before(**arguments) if before is not MISSING else site.base(module, **arguments)


def _named(module, args, kwargs):
    """All arguments by name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _cross_entropy(module, logits, labels, items):
    """The part of the loss that this rank's tokens have; parts add up to the mean over all tokens."""
    function = getattr(module, "loss_function", None)
    if function is None:
        flat = logits.float().flatten(0, -2), labels.flatten()
        return torch.nn.functional.cross_entropy(*flat, ignore_index=-100, reduction="sum") / items
    return function(
        logits=logits, labels=labels, vocab_size=logits.shape[-1], shift_labels=labels, num_items_in_batch=items
    )


def _balance(module, router_logits, plan):
    """The auxiliary loss of the router over all tokens: it is no sum over tokens, so their logits are gathered."""
    function = inspect.unwrap(type(module).forward).__globals__["load_balancing_loss_func"]
    whole = tuple(gather(x.flatten(0, -2), plan, 0) for x in router_logits)
    return function(whole, module.num_experts, module.num_experts_per_tok, None)


def parallel_forward(module, *args, **kwargs):
    site = module._tidegate.sites[OP]
    handle = site.parallel
    arguments = _named(module, args, kwargs)
    if not handle.on:
        return _original(site, module, arguments)
    if arguments.get("sequence_parallel") is None:
        arguments = handle.shard(arguments)
    plan = arguments["sequence_parallel"]
    handle.plan = plan
    labels, shifted, items = (arguments.pop(name, None) for name in LOSS)
    as_dict = arguments.pop("return_dict", True)
    balance = labels is not None or shifted is not None
    out = _original(site, module, {**arguments, "use_cache": False, "return_dict": True})
    for name in ("logits", "last_hidden_state"):
        if getattr(out, name, None) is not None:
            setattr(out, name, getattr(out, name)[:, : plan.own.tokens])
    if balance and getattr(out, "logits", None) is not None:
        out.loss = total(_cross_entropy(module, out.logits, shifted, items), plan)
    if getattr(out, "aux_loss", None) is not None:
        out.aux_loss = _balance(module, out.router_logits, plan)
        if balance:
            out.loss = out.loss + module.router_aux_loss_coef * out.aux_loss.to(out.loss.dtype)
    return out if as_dict in (True, None) else out.to_tuple()

"""The router, the order of pairs and the way back in plain torch."""

import torch

from tidegate._contracts import FLOATS
from tidegate.fallback.checks import choice, refuse, wide


def places(op, name, values, limit):
    """Indices as int64, each -1 or below a limit."""
    values = values.long()
    wrong = ((values < -1) | (values >= limit)).nonzero().tolist()
    if wrong:
        at = ",".join(map(str, wrong[0]))
        refuse(op, f"{name}[{at}]", f"-1 or 0..{limit - 1}", values[tuple(wrong[0])].item())
    return values


def expert_ids(op, ids, experts, convention="plain", name="ids"):
    """Ids as int64, -1 for nobody."""
    choice(op, "ids_convention", convention, "plain or transformers_ep")
    ids = ids.long()
    return places(op, name, ids.masked_fill(ids == experts, -1) if convention != "plain" else ids, experts)


def _logits(op, logits, rounding):
    if rounding is None:
        return logits.to(wide(logits))
    if rounding not in FLOATS:
        refuse(op, "logits_rounding", "dtype float32, bfloat16 or float16", f"dtype {str(rounding)[6:]}")
    return logits.to(rounding).to(wide(logits))


def _softmax(z, ids, renormalise):
    """Probabilities of all experts, and the weights of the chosen ones; nobody has 0."""
    p, chosen = z.softmax(-1), ids >= 0
    if not renormalise:
        return p, p.gather(1, ids.clamp(min=0)).masked_fill(~chosen, 0)
    among = z.gather(1, ids.clamp(min=0)).masked_fill(~chosen, -torch.inf)
    return p, among.softmax(-1).masked_fill(~chosen, 0)


def _check_rows(op, logits, replay, k):
    """The first token that cannot be routed."""
    above = logits > -torch.inf
    infinite = ~(logits < torch.inf)
    few, masked = above.sum(1) < k, torch.zeros(len(logits), dtype=torch.bool)
    if replay is not None:
        few = masked
        masked = (replay >= 0).any(1) & ~(above.gather(1, replay.clamp(min=0)) & (replay >= 0)).any(1)
    for t in (infinite.any(1) | few | masked).nonzero()[:1, 0].tolist():
        if infinite[t].any():
            refuse(op, f"logits[{t}]", "numbers below +inf", logits[t][infinite[t]][0].item())
        if few[t]:
            refuse(op, f"logits[{t}]", f"at least {k} above -inf", int(above[t].sum()))
        refuse(op, f"replay_ids[{t}]", "an expert above -inf", "none")


def moe_route_fwd(
    logits, top_k, replay_ids=None, renormalise=True, logits_rounding=None, weights_dtype=None, output_probs=False
):
    op, E = "moe_route_fwd", logits.shape[1]
    if not 1 <= top_k <= E:
        refuse(op, "top_k", f"1 to {E} (experts)", top_k)
    z = _logits(op, logits, logits_rounding)
    ids = None if replay_ids is None else expert_ids(op, replay_ids, E, name="replay_ids")
    _check_rows(op, logits, ids, top_k)
    if ids is None:  # stable: the lowest id first among equal logits
        ids = z.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    p, weights = _softmax(z, ids, renormalise)
    return weights.to(weights_dtype or logits.dtype), ids.int(), p if output_probs else p.new_empty(0)


def moe_route_bwd(dweights, dprobs, logits, ids, renormalise=True, logits_rounding=None):
    op = "moe_route_bwd"
    z = _logits(op, logits, logits_rounding)
    ids = expert_ids(op, ids, logits.shape[1])
    p, w = _softmax(z, ids, renormalise)
    dw = torch.zeros_like(w) if dweights is None else dweights.to(z.dtype).masked_fill(ids < 0, 0)
    dp = torch.zeros_like(p) if dprobs is None else dprobs.clone()
    if not renormalise:
        dp.scatter_add_(1, ids.clamp(min=0), dw)
    dz = p * (dp - (p * dp).sum(-1, keepdim=True))
    if renormalise:
        dz.scatter_add_(1, ids.clamp(min=0), w * (dw - (w * dw).sum(-1, keepdim=True)))
    return dz.to(logits.dtype)


def moe_init_routing(ids, num_experts, ids_convention="plain"):
    op = "moe_init_routing"
    if num_experts < 0:
        refuse(op, "num_experts", "at least 0", num_experts)
    ids = expert_ids(op, ids, num_experts, ids_convention)
    pairs = ids.flatten()
    order = torch.where(pairs < 0, num_experts, pairs).sort(stable=True).indices.int()
    counts = torch.bincount(pairs[pairs >= 0], minlength=num_experts)
    routed = int(counts.sum())
    pos = torch.full_like(order, -1)
    pos[order[:routed].long()] = torch.arange(routed, dtype=torch.int32)
    order[routed:] = -1
    return counts, order, pos.view(ids.shape)


def moe_permute(x, src, pos):
    op, k = "moe_permute", pos.shape[1]
    if k < 1:
        refuse(op, "k", "at least 1", k)
    src = places(op, "src", src, x.shape[0] * k)
    y = x.new_zeros(len(src), x.shape[1])
    y[src >= 0] = x[src[src >= 0] // k]
    return y


def moe_unpermute_fwd(y, pos, weights=None):
    pos = places("moe_unpermute_fwd", "pos", pos, y.shape[0])
    out = y.new_zeros(pos.shape[0], y.shape[1], dtype=wide(y))
    for slot in range(pos.shape[1]):
        t = (pos[:, slot] >= 0).nonzero()[:, 0]
        rows = y[pos[t, slot]].to(out.dtype)
        out[t] += rows if weights is None else weights[t, slot, None].to(out.dtype) * rows
    return out.to(y.dtype)


def moe_unpermute_bwd(dout, y, pos, weights=None, rounded=True):
    op = "moe_unpermute_bwd"
    pos = places(op, "pos", pos, y.shape[0])
    taken = set()
    for t, slot in (pos >= 0).nonzero().tolist():
        place = pos[t, slot].item()
        if place in taken:
            refuse(op, f"pos[{t},{slot}]", "a place of its own", f"{place} again")
        taken.add(place)
    t, slot = (pos >= 0).nonzero(as_tuple=True)
    rows, d = y[pos[t, slot]].to(wide(y)), dout[t].to(wide(y))
    dy = torch.zeros_like(y, dtype=wide(y))
    dy[pos[t, slot]] = d if weights is None else weights[t, slot, None].to(d.dtype) * d
    dweights = d.new_zeros(pos.shape)
    dweights[t, slot] = (d * rows).sum(-1)
    if not rounded:
        return dy, dweights
    return dy.to(y.dtype), d.new_empty(0) if weights is None else dweights.to(weights.dtype)

"""The router and the experts in plain torch, for autograd in fp64."""

import torch


def route(logits, k, renormalise=True):
    """Stable: the lowest id first among equal logits."""
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    p = logits.softmax(-1)
    w = p.gather(1, ids)
    return ids, w / w.sum(-1, keepdim=True) if renormalise else w, p


def expert(x, gate, up, down):
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def experts(x, ids, weights, gate_up, down, shared_gate=None, shared_up=None, shared_down=None, shared_router=None):
    """A loop over tokens and slots; id -1 is nobody."""
    width = down.shape[2]
    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[t])
        for slot, e in enumerate(ids[t].tolist()):
            if e >= 0:
                y = expert(x[t], gate_up[e, :width], gate_up[e, width:], down[e])
                total = total + weights[t, slot] * y
        if shared_gate is not None:
            total = total + torch.sigmoid(x[t] @ shared_router) * expert(x[t], shared_gate, shared_up, shared_down)
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(x)


def grouped_matmul(x, weight, counts, bias=None):
    """weight [G,N,K]; rows outside all groups are 0."""
    parts, at = [], 0
    for g, count in enumerate(counts.tolist()):
        y = x[at : at + count] @ weight[g].T
        parts.append(y if bias is None else y + bias[g])
        at += count
    return torch.cat([*parts, x.new_zeros(x.shape[0] - at, weight.shape[1])])

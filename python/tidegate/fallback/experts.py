"""The experts of a layer in plain torch. Weights are widened one expert at a time."""

import torch

from tidegate.fallback.checks import finite, refuse, wide
from tidegate.fallback.products import check_needs, laid_as, matrices, one_step
from tidegate.fallback.routing import expert_ids


def check_shared(op, **shared):
    gate = shared["shared_gate"]
    for name, value in shared.items():
        if (value is None) != (gate is None):
            text = [("none" if t is None else "a tensor") for t in (gate, value)]
            refuse(op, name, f"{text[0]} (as shared_gate)", text[1])
        if value is not None and name != "shared_router":
            one_step(op, name, value)


class LowRank:
    """The addition scale b a to the weights of all experts; absent: none."""

    def __init__(self, op, name, a, b, scale):
        if (a is None) != (b is None):
            text = [("none" if t is None else "a tensor") for t in (a, b)]
            refuse(op, f"{name}_lora_b", f"{text[0]} (as {name}_lora_a)", text[1])
        finite(op, f"{name}_lora_scale", scale)
        for t, factor in ((a, "a"), (b, "b")) if a is not None else ():
            one_step(op, f"{name}_lora_{factor}", t)
        self.a, self.b, self.scale = a, b, scale

    def added(self, weight, e):
        if self.a is None:
            return weight
        return weight + self.scale * (self.b[e].to(weight.dtype) @ self.a[e].to(weight.dtype))

    def gradients(self, dweight, e):
        """Of a and b, from that of the sum."""
        a, b = self.a[e].to(dweight.dtype), self.b[e].to(dweight.dtype)
        return self.scale * (b.T @ dweight), self.scale * (dweight @ a.T)


class Experts:
    """The experts of a call: who has which pairs, and matrices [N,K] in the type of sums."""

    def __init__(self, op, x, ids, gate_up, down, shared, lora, weight_axes, interleaved, ids_convention):
        self.gate_up = matrices(op, "gate_up", gate_up, weight_axes)
        self.down = matrices(op, "down", down, weight_axes)
        check_shared(op, **shared)
        a, b, c, d, *scales = lora
        self.lora = LowRank(op, "gate_up", a, b, scales[0]), LowRank(op, "down", c, d, scales[1])
        self.ids = expert_ids(op, ids, len(gate_up), ids_convention)
        self.shared, self.interleaved = shared, interleaved
        self.dtype, self.x = x.dtype, x.to(wide(x))

    def used(self):
        return self.ids[self.ids >= 0].unique().tolist()

    def pairs(self, e):
        return (self.ids == e).nonzero(as_tuple=True)

    def weights(self, e):
        """gate, up and down of expert e, or of the shared one (None)."""
        if e is None:
            three = [self.shared[name] for name in ("shared_gate", "shared_up", "shared_down")]
            return [w.to(self.x.dtype) for w in three]
        both, down = (
            lora.added(w[e].to(self.x.dtype), e) for lora, w in zip(self.lora, (self.gate_up, self.down), strict=True)
        )
        return [*((both[::2], both[1::2]) if self.interleaved else both.chunk(2)), down]

    def joined(self, dgate, dup):
        """The gradient of a gate_up from those of its parts."""
        return torch.stack([dgate, dup], 1).flatten(0, 1) if self.interleaved else torch.cat([dgate, dup])

    def round(self, value):
        return value.to(self.dtype).to(value.dtype)

    def result(self, e, x, round_y):
        """y of rows, and what gate and up make of them, [rows,2,I]."""
        gate, up, down = self.weights(e)
        g, u = x @ gate.T, x @ up.T
        y = self.round(torch.nn.functional.silu(g) * u) @ down.T
        return self.round(y) if round_y else y, torch.stack([g, u], 1)

    def gradients(self, e, x, dy, w, hidden=None):
        """Of x, the factor w [rows], gate, up and down. hidden: what the forward made of the rows."""
        gate, up, down = self.weights(e)
        g, u = (x @ gate.T, x @ up.T) if hidden is None else hidden.unbind(1)
        da, w = dy @ down, w[:, None]
        s = torch.sigmoid(g)
        a = self.round(g * s * u)
        dg, du = self.round(w * da * u * s * (1 + g * (1 - s))), self.round(w * da * g * s)
        return dg @ gate + du @ up, (da * a).sum(-1), dg.T @ x, du.T @ x, (w * dy).T @ a


def _shared(shared_gate, shared_up, shared_down, shared_router):
    return dict(shared_gate=shared_gate, shared_up=shared_up, shared_down=shared_down, shared_router=shared_router)


def moe_experts_fwd(
    x,
    ids,
    weights,
    gate_up,
    down,
    shared_gate=None,
    shared_up=None,
    shared_down=None,
    shared_router=None,
    gate_up_lora_a=None,
    gate_up_lora_b=None,
    down_lora_a=None,
    down_lora_b=None,
    weight_axes="nk",
    interleaved=False,
    ids_convention="plain",
    gate_up_lora_scale=1.0,
    down_lora_scale=1.0,
    round_y=False,
    save_hidden=False,
):
    shared = _shared(shared_gate, shared_up, shared_down, shared_router)
    lora = gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b, gate_up_lora_scale, down_lora_scale
    n = Experts("moe_experts_fwd", x, ids, gate_up, down, shared, lora, weight_axes, interleaved, ids_convention)
    out = torch.zeros_like(n.x)
    kept = save_hidden and x.dtype != torch.float64
    hidden = x.new_zeros((ids.numel(), 2, n.down.shape[2]) if kept else 0, dtype=torch.float32)
    place = 0  # of an expert's first pair
    for e in n.used():
        t, slot = n.pairs(e)
        y, rows = n.result(e, n.x[t], round_y)
        out.index_add_(0, t, weights[t, slot, None].to(out.dtype) * y)
        if kept:
            hidden[place : place + len(t)] = rows
        place += len(t)
    if shared_gate is not None:
        factor = torch.sigmoid(n.x @ shared_router.to(out.dtype))
        out += factor[:, None] * n.result(None, n.x, round_y)[0]
    return out.to(x.dtype), hidden


def moe_experts_bwd(
    dout,
    x,
    ids,
    weights,
    gate_up,
    down,
    shared_gate=None,
    shared_up=None,
    shared_down=None,
    shared_router=None,
    gate_up_lora_a=None,
    gate_up_lora_b=None,
    down_lora_a=None,
    down_lora_b=None,
    hidden=None,
    weight_axes="nk",
    interleaved=False,
    ids_convention="plain",
    gate_up_lora_scale=1.0,
    down_lora_scale=1.0,
    needs=4095,
    rounded=True,
):
    op = "moe_experts_bwd"
    check_needs(op, needs, 12)
    shared = _shared(shared_gate, shared_up, shared_down, shared_router)
    lora = gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b, gate_up_lora_scale, down_lora_scale
    n = Experts(op, x, ids, gate_up, down, shared, lora, weight_axes, interleaved, ids_convention)
    dy = dout.to(n.x.dtype)
    inputs = (x, weights, gate_up, down, *shared.values(), *lora[:4])
    new = lambda t: torch.zeros(t.shape, dtype=dy.dtype)  # noqa: E731
    found = [None if t is None or not needs >> i & 1 else new(t) for i, t in enumerate(inputs)]
    dx, dw = new(x), new(weights)
    # Views as [E,N,K] of what will be returned.
    dgate_up, ddown = (t if t is None or weight_axes == "nk" else t.mT for t in found[2:4])
    place = 0  # of an expert's first pair
    for e in n.used():
        t, slot = n.pairs(e)
        rows = None if hidden is None else hidden[place : place + len(t)]
        place += len(t)
        d, dw[t, slot], dgate, dup, dlast = n.gradients(e, n.x[t], dy[t], weights[t, slot].to(dy.dtype), rows)
        dx.index_add_(0, t, d)
        for i, (full, d) in enumerate(((dgate_up, n.joined(dgate, dup)), (ddown, dlast))):
            if full is not None:
                full[e] = d
            narrow = found[8 + 2 * i : 10 + 2 * i]
            if narrow != [None, None]:
                for part, value in zip(narrow, n.lora[i].gradients(d, e), strict=True):
                    if part is not None:
                        part[e] = value
    if shared_gate is not None:
        router = shared_router.to(dy.dtype)
        factor = torch.sigmoid(n.x @ router)
        d, dfactor, *three = n.gradients(None, n.x, dy, factor)
        dz = dfactor * factor * (1 - factor)
        dx += d + dz[:, None] * router
        found[4:8] = [t if f is not None else None for t, f in zip((*three, dz @ n.x), found[4:8], strict=True)]
    found[:2] = [t if f is not None else None for t, f in zip((dx, dw), found, strict=False)]
    return tuple(
        (x if t is None else t).new_empty(0) if f is None else laid_as(f.to(t.dtype), t) if rounded else f
        for t, f in zip(inputs, found, strict=True)
    )

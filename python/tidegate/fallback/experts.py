"""Products with the weights of groups and experts in plain torch. Weights are widened one group at a time."""

import torch

from tidegate.fallback.checks import choice, finite, refuse, wide
from tidegate.fallback.routing import expert_ids


def group_offsets(op, groups, rows, group_list):
    """Where groups begin and end, as a list with one entry more than groups."""
    counts = choice(op, "group_list", group_list, "counts or cumsum") == "counts"
    ends = [0]
    for g, value in enumerate(groups.tolist()):
        least, most = (0, rows - ends[-1]) if counts else (ends[-1], rows)
        if value < least:
            refuse(op, f"groups[{g}]", f">= {least}", value)
        if value > most:
            refuse(op, f"groups[{g}]", f"<= {most} (of {rows} rows)", value)
        ends.append(ends[-1] + value if counts else value)
    return ends


def matrices(op, name, weight, weight_axes):
    """weight as [G,N,K], a view; of the strides of N and K one must be 1, as the native kernels need it."""
    choice(op, "weight_axes", weight_axes, "nk or kn")
    one_step(op, name, weight)
    return weight if weight_axes == "nk" else weight.mT


def one_step(op, name, t):
    if t.numel() and 1 not in (*t.stride()[-2:], *t.shape[-2:]):
        refuse(op, name, "stride 1 in one of the last two dimensions", f"{t.stride(-2)} and {t.stride(-1)}")


def laid_as(value, t):
    """value in the memory order of t: a matrix whose rows are its inner dimension in memory stays that way."""
    turned = t.dim() >= 2 and t.stride(-1) != 1 and t.stride(-2) == 1
    return value.mT.contiguous().mT if turned else value.contiguous()


def check_needs(op, needs, results):
    if not 0 <= needs < 1 << results:
        refuse(op, "needs", f"0 to {(1 << results) - 1} (a bit for every result)", needs)


def grouped_matmul_fwd(x, weight, groups, bias=None, weight_axes="nk", group_list="counts", out_dtype=None):
    op = "grouped_matmul_fwd"
    weight = matrices(op, "weight", weight, weight_axes)
    ends = group_offsets(op, groups, x.shape[0], group_list)
    y = x.new_zeros(x.shape[0], weight.shape[1], dtype=wide(x))
    for g, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        y[a:b] = x[a:b].to(y.dtype) @ weight[g].to(y.dtype).T
        if bias is not None:
            y[a:b] += bias[g].to(y.dtype)
    return y.to(out_dtype or x.dtype)


def grouped_matmul_bwd(
    dy, x, weight, groups, weight_axes="nk", group_list="counts", needs=7, rounded=True, accumulate=False
):
    op, given = "grouped_matmul_bwd", weight
    check_needs(op, needs, 3)
    weight = matrices(op, "weight", weight, weight_axes)
    ends = group_offsets(op, groups, dy.shape[0], group_list)
    d, xw = dy.to(wide(x)), x.to(wide(x))
    dx, dweight = torch.zeros_like(xw), torch.zeros(weight.shape, dtype=d.dtype)
    dbias = d.new_zeros(weight.shape[:2])
    for g, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        if needs & 1:
            dx[a:b] = d[a:b] @ weight[g].to(d.dtype)
        if needs & 2:
            dweight[g] = d[a:b].T @ xw[a:b]
        dbias[g] = d[a:b].double().sum(0)
    results = dx, dweight if weight_axes == "nk" else dweight.mT, dbias
    if rounded:
        results = dx.to(x.dtype), laid_as(results[1].to(weight.dtype), given), dbias.to(weight.dtype)
    return tuple(t if needs >> i & 1 else weight.new_empty(0) for i, t in enumerate(results))


def linear_shapes(op, x, weight, bias=None, dy=None, **_options):
    """In the words of the native operator, which does not know N before it has a matrix."""
    if x.dim() < 1:
        refuse(op, "x", "at least 1 dimension", "none")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        refuse(op, "weight", f"[N, {x.shape[-1]}]", list(weight.shape))
    if bias is not None and bias.shape != weight.shape[:1]:
        refuse(op, "bias", list(weight.shape[:1]), list(bias.shape))


def linear_fwd(x, weight, bias=None):
    y = x.to(wide(x)) @ weight.to(wide(x)).T
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


def linear_bwd(dy, x, weight, needs=7):
    rows, d = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    groups = torch.tensor([len(rows)])
    dx, dweight, dbias = grouped_matmul_bwd(d, rows, weight[None], groups, needs=needs & 7)
    nothing = weight.new_empty(0)
    dx = dx.view(x.shape) if needs & 1 else x.new_empty(0)
    return dx, dweight[0] if needs & 2 else nothing, dbias[0] if needs & 4 else nothing


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
        gate, up, down = self.weights(e)
        y = self.round(torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        return self.round(y) if round_y else y

    def gradients(self, e, x, dy, w):
        """Of x, the factor w [rows], gate, up and down."""
        gate, up, down = self.weights(e)
        g, u, da, w = x @ gate.T, x @ up.T, dy @ down, w[:, None]
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
):
    shared = _shared(shared_gate, shared_up, shared_down, shared_router)
    lora = gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b, gate_up_lora_scale, down_lora_scale
    n = Experts("moe_experts_fwd", x, ids, gate_up, down, shared, lora, weight_axes, interleaved, ids_convention)
    out = torch.zeros_like(n.x)
    for e in n.used():
        t, slot = n.pairs(e)
        out.index_add_(0, t, weights[t, slot, None].to(out.dtype) * n.result(e, n.x[t], round_y))
    if shared_gate is not None:
        factor = torch.sigmoid(n.x @ shared_router.to(out.dtype))
        out += factor[:, None] * n.result(None, n.x, round_y)
    return out.to(x.dtype)


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
    for e in n.used():
        t, slot = n.pairs(e)
        d, dw[t, slot], dgate, dup, dlast = n.gradients(e, n.x[t], dy[t], weights[t, slot].to(dy.dtype))
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

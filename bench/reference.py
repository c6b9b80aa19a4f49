"""fp64 truth of every kind of item, and the error of a result against it.

Everything is computed from the rounded inputs that the engines get. Work is cut into blocks of channels or rows: whole
items in fp64 would need several GB of temporaries.
"""

import torch
from torch.utils.checkpoint import checkpoint

from items import SLOTS, WIDTH, H, Item, K

BLOCK = 512  # channels, or rows of the leading dimension


def truth(item: Item, x: dict) -> dict[str, torch.Tensor]:
    """Output name -> fp64 tensor, in the layout that engines' results are compared in."""
    with torch.no_grad():
        return _TRUTH[item.kind](item, x)


def errors(got: dict, want: dict) -> dict[str, dict[str, float]]:
    """Largest absolute error and rms(error) / rms(truth) of every output that the engine has."""
    found = {}
    for name, reference in want.items():
        if name not in got:
            continue
        result = got[name]
        if result.shape != reference.shape:
            raise ValueError(f"{name}: expected shape {list(reference.shape)}, got {list(result.shape)}")
        largest, off, size = 0.0, 0.0, 0.0
        for r, e in zip(result.split(BLOCK), reference.split(BLOCK), strict=True):
            d = r.double() - e
            largest = max(largest, d.abs().max().item()) if not d.isnan().any() else float("nan")
            off, size = off + d.square().sum().item(), size + e.square().sum().item()
        found[name] = {"max": largest, "rel": (off / size) ** 0.5}
    return found


def _recurrence(q, k, v, decay, beta, state):
    """The delta rule token by token: q, k [T,H,K], v [T,H,V], decay = e^g and beta [T,H], state [H,K,V]."""
    out = []
    for t in range(len(q)):
        state = state * decay[t][:, None, None]
        d = beta[t][:, None] * (v[t] - torch.bmm(k[t][:, None], state)[:, 0])
        state = torch.baddbmm(state, k[t][:, :, None], d[:, None])
        out.append(torch.bmm(q[t][:, None], state)[:, 0])
    return torch.stack(out) * K**-0.5, state


def _sequences(item, x, names=("q", "k", "v", "g", "beta")):
    """Every sequence's tensors in fp64, [T, heads, ...]."""
    flat = [x[n].flatten(0, 1) for n in names]
    for begin, end in item.spans:
        yield [t[begin:end].double() for t in flat]


def _heads(t, HV):
    return t.repeat_interleave(HV // t.shape[1], 1)


def _rule(item, x):
    HV, outs, states = item.sizes["HV"], [], []
    for n, (q, k, v, g, beta) in enumerate(_sequences(item, x)):
        s0 = x["state"][n].double() if "state" in x else v.new_zeros(HV, K, v.shape[-1])
        o, s = _recurrence(_heads(q, HV), _heads(k, HV), v, g.exp(), beta, s0)
        outs.append(o)
        states.append(s)
    return {"o": torch.cat(outs).view(x["v"].shape), "S": torch.stack(states)}


def _layer_step(item, x):
    B, HK, HV = (item.sizes[n] for n in ("B", "HK", "HV"))
    window = torch.cat([x["conv"], x["mixed"][:, :, None]], -1).double()
    p = (window * x["w"].double()).sum(-1)
    q, k, v = (t.view(B, -1, K) for t in (p * torch.sigmoid(p)).split([HK * K, HK * K, HV * K], 1))
    q, k = (_unit(t, t.square().sum(-1, True)) for t in (q, k))
    gates = _gating({n: x[n] for n in "ab"}, x)
    step = [
        _heads(q, HV)[:, None],
        _heads(k, HV)[:, None],
        v[:, None],
        gates["g"].exp()[:, None],
        gates["beta"][:, None],
    ]
    done = [_recurrence(*(t[n] for t in step), x["state"][n].double()) for n in range(B)]
    o, z = torch.cat([o for o, _ in done]), x["z"].view(B, HV, K).double()
    y = x["norm"].double() * _unit(o, o.square().mean(-1, True)) * z * torch.sigmoid(z)
    return {"y": y.flatten(1), "S": torch.stack([s for _, s in done])}


def _train(item, x, segment=64):
    """Autograd through the recurrence; only the states between segments are kept, the rest is computed twice."""
    names = ("q", "k", "v", "g", "beta")
    leaves = [t.requires_grad_() for t in next(_sequences(item, x))]
    do = x["do"][0].double()
    HV = item.sizes["HV"]

    def run(q, k, v, g, beta, state):
        return _recurrence(_heads(q, HV), _heads(k, HV), v, g.exp(), beta, state)

    with torch.enable_grad():
        state, loss = leaves[2].new_zeros(HV, K, do.shape[-1]), 0.0
        for begin in range(0, len(do), segment):
            part = [t[begin : begin + segment] for t in leaves]
            o, state = checkpoint(run, *part, state, use_reentrant=False)
            loss = loss + (o * do[begin : begin + segment]).sum()
        grads = torch.autograd.grad(loss, leaves)
    return {f"d{n}": t[None] for n, t in zip(names, grads, strict=True)}


def _taps(x, w):
    """sum_j w[:, j] x[t - (W-1) + j] with zeros before the first token; x [T,D]."""
    W, T = w.shape[1], len(x)
    padded = torch.cat([x.new_zeros(W - 1, x.shape[1]), x])
    return sum(w[:, j] * padded[j : j + T] for j in range(W)), padded


def _by_channel(function, *tensors, dims):
    """function on blocks of channels (dims: where each tensor has them), results joined along their last dimension."""
    blocks = zip(*(t.split(BLOCK, dim) for t, dim in zip(tensors, dims, strict=True)), strict=True)
    results = [function(*(b.double() for b in block)) for block in blocks]
    return [torch.cat(parts, -1) for parts in zip(*results, strict=True)]


def _conv(item, x):
    def block(x, w):
        p, _ = _taps(x, w)
        return (p * torch.sigmoid(p),)

    return {"y": _by_channel(block, x["x"], x["w"], dims=(1, 0))[0]}


def _conv_bwd(item, x):
    def block(dy, x, w):
        p, padded = _taps(x, w)
        W, T = w.shape[1], len(x)
        s = torch.sigmoid(p)
        e = dy * s * (1 + p * (1 - s))
        late = torch.cat([e, e.new_zeros(W - 1, e.shape[1])])
        dx = sum(late[i : i + T] * w[:, W - 1 - i] for i in range(W))
        return dx, torch.stack([(e * padded[j : j + T]).sum(0) for j in range(W)])

    dx, dw = _by_channel(block, x["dy"], x["x"], x["w"], dims=(1, 1, 0))
    return {"dx": dx, "dw": dw.T}


def _conv_update(item, x):
    window = torch.cat([x["state"], x["x"][:, :, None]], -1).double()
    p = (window * x["w"].double()).sum(-1)
    return {"y": p * torch.sigmoid(p), "state": window[..., 1:]}


def _by_row(function):
    """function(block of each row tensor, x) -> outputs, block by block along the first dimension."""

    def run(item, x):
        rows = [n for n, t in x.items() if t.shape[0] == x[next(iter(x))].shape[0] and t.dim() > 1]
        blocks = zip(*(x[n].split(BLOCK) for n in rows), strict=True)
        parts = [function(dict(zip(rows, block, strict=True)), x) for block in blocks]
        return {n: torch.cat([p[n] for p in parts]) for n in parts[0]}

    return run


def _unit(x, total, eps=1e-6):
    return x * torch.rsqrt(total + eps)


def _norm_gated(block, x):
    v, z = block["x"].double(), block["z"].double()
    return {"y": x["w"].double() * _unit(v, v.square().mean(-1, True)) * z * torch.sigmoid(z)}


def _l2norm(block, x):
    v = block["x"].double()
    return {"y": _unit(v, v.square().sum(-1, True))}


def _rms_norm(block, x):
    v = block["x"].double()
    return {"y": _unit(v, v.square().mean(-1, True)) * (1 + x["w"].double())}


def _gating(block, x):
    s = block["a"].double() + x["dt_bias"].double()
    softplus = s.clamp(min=0) + torch.log1p(torch.exp(-s.abs()))
    return {"g": -x["A_log"].double().exp() * softplus, "beta": torch.sigmoid(block["b"].double())}


def _rope(item, x):
    R = x["cos"].shape[-1]
    first, second, rest = x["x"].double().split([R // 2, R // 2, x["x"].shape[-1] - R], -1)
    (c1, c2), (s1, s2) = (x[n].double()[:, None].split(R // 2, -1) for n in ("cos", "sin"))
    return {"y": torch.cat([first * c1 - second * s1, second * c2 + first * s2, rest], -1)}


SAMPLED = 4  # experts whose weights' gradients are compared


def _pairs(x):
    """(expert, tokens, slots) of every expert that somebody has."""
    for e in x["ids"].unique().tolist():
        yield e, *(x["ids"] == e).nonzero(as_tuple=True)


def _expert(x, e, tokens):
    rows, gate_up, down = x["x"][tokens].double(), x["gate_up"][e].double(), x["down"][e].double()
    gate, up = (rows @ gate_up.T).split(WIDTH, 1)
    return rows, gate_up, down, gate, up, torch.sigmoid(gate)


def _experts(item, x):
    y = torch.zeros(x["x"].shape, dtype=torch.float64)
    for e, tokens, slots in _pairs(x):
        _, _, down, gate, up, s = _expert(x, e, tokens)
        y.index_add_(0, tokens, x["weights"][tokens, slots, None].double() * ((gate * s * up) @ down.T))
    return {"y": y}


def _experts_bwd(item, x):
    T = len(x["x"])
    dx, dw = torch.zeros(T, H, dtype=torch.float64), torch.zeros(T, SLOTS, dtype=torch.float64)
    dgate_up = torch.zeros(SAMPLED, 2 * WIDTH, H, dtype=torch.float64)
    ddown = torch.zeros(SAMPLED, H, WIDTH, dtype=torch.float64)
    for e, tokens, slots in _pairs(x):
        rows, gate_up, down, gate, up, s = _expert(x, e, tokens)
        dy, w = x["dout"][tokens].double(), x["weights"][tokens, slots, None].double()
        da, a = dy @ down, gate * s * up
        dw[tokens, slots] = (da * a).sum(1)
        dh = torch.cat([w * da * up * s * (1 + gate * (1 - s)), w * da * gate * s], 1)
        dx.index_add_(0, tokens, dh @ gate_up)
        if e < SAMPLED:
            dgate_up[e], ddown[e] = dh.T @ rows, (w * dy).T @ a
    return {"dx": dx, "dw": dw, "dgate_up": dgate_up, "ddown": ddown}


_TRUTH = {
    "prefill": _rule,
    "decode": _rule,
    "layer_step": _layer_step,
    "train": _train,
    "conv": _conv,
    "conv_bwd": _conv_bwd,
    "conv_update": _conv_update,
    "norm_gated": _by_row(_norm_gated),
    "l2norm": _by_row(_l2norm),
    "rms_norm": _by_row(_rms_norm),
    "gating": _by_row(_gating),
    "rope": _rope,
    "experts": _experts,
    "experts_bwd": _experts_bwd,
}

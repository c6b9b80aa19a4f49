"""From the arguments of the delta rule's operators to plain head-major tensors: gates, norms, layouts, boundaries."""

import torch

from tidegate._contracts import LAYOUTS
from tidegate.fallback.checks import choice, finite, head_major, offsets, refuse, wide
from tidegate.fallback.rows import log_decay


def check_options(op, given):
    """Values of the options that all operators of the rule share. Returns the scale."""
    if given.get("dt_bias") is not None and given.get("A_log") is None:
        refuse(op, "dt_bias", "none without A_log", "a tensor")
    if given.get("g") is None and given.get("A_log") is not None:
        refuse(op, "g", "a tensor with A_log", "none")
    if not given["beta_sigmoid"] and given["beta_scale"] != 1:
        refuse(op, "beta_scale", "1 without beta_sigmoid", given["beta_scale"])
    finite(op, "beta_scale", given["beta_scale"])
    if "precision" in given:
        choice(op, "precision", given["precision"], "fp32 or bf16")
    scale = given.get("scale")
    return finite(op, "scale", given["k"].shape[-1] ** -0.5 if scale is None else scale)


def sequences(op, given, steps=False):
    """(row, begin, end) of every sequence. steps: without boundaries every token of a packed layout is one."""
    k = head_major(given["k"], given["layout"])
    rows, tokens = k.shape[0], k.shape[2]
    if given["cu_seqlens"] is not None:
        cu = offsets(op, given["cu_seqlens"], tokens)
        return [(0, begin, end) for begin, end in zip(cu, cu[1:], strict=False)]
    if steps and "B" not in LAYOUTS[given["layout"]]:
        return [(0, t, t + 1) for t in range(tokens)]
    return [(row, 0, tokens) for row in range(rows)]


def _unit(x, zero_row_safe):
    if zero_row_safe:  # a row of zeros gets no gradient
        x = torch.where((x == 0).all(-1, keepdim=True), x.detach(), x)
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def prepare(q, k, v, g, beta, A_log, dt_bias, gk, given):
    """q, k [B,HV,T,K], v, g, beta, gk: everything that the formula wants, in the type of sums. q may be None."""
    layout, dtype = given["layout"], wide(k)
    q, k, v, g, beta, gk = (None if x is None else head_major(x, layout).to(dtype) for x in (q, k, v, g, beta, gk))
    if given["use_qk_l2norm"]:
        safe = given.get("zero_row_safe", False)
        q, k = None if q is None else _unit(q, safe), _unit(k, safe)
    G = v.shape[1] // k.shape[1]
    q, k = (None if x is None else x.repeat_interleave(G, 1) for x in (q, k))
    if A_log is not None:
        g = log_decay(g.transpose(1, 2), A_log, dt_bias).transpose(1, 2)
    if given["beta_sigmoid"]:
        beta = given["beta_scale"] * torch.sigmoid(beta)
    return q, k, v, g, beta, gk


def runs(spans):
    """Sequences that can be computed together: all rows of a batch, or else each on its own. Lists of indices."""
    whole = len({(begin, end) for _, begin, end in spans}) == 1 and len({row for row, *_ in spans}) == len(spans)
    return [list(range(len(spans)))] if whole and spans else [[n] for n in range(len(spans))]


def pick(x, spans):
    """[R,H,L,...]: the tokens of sequences of one length."""
    if x is None:
        return None
    if len({span[1:] for span in spans}) == 1 and [row for row, *_ in spans] == list(range(x.shape[0])):
        return x[:, :, spans[0][1] : spans[0][2]]
    return torch.stack([x[row, :, begin:end] for row, begin, end in spans])

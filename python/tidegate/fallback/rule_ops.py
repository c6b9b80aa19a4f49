"""Operators of the gated delta rule that take states and return new ones, and their gradient."""

import torch

from tidegate.fallback.checks import from_head_major, refuse, wide
from tidegate.fallback.gradients import pull_back
from tidegate.fallback.rule import delta_rule
from tidegate.fallback.rule_inputs import check_options, pick, prepare, runs, sequences

SAVED_STATE_TOKENS = 256  # as in _fake.py


def _evaluate(q, k, v, g, beta, h0, A_log, dt_bias, gk, given, spans, scale):
    """o [B,HV,T,V] and the final states [N,HV,K,V]. Differentiable."""
    q, k, v, g, beta, gk = prepare(q, k, v, g, beta, A_log, dt_bias, gk, given)
    B, HV, T, V = v.shape
    if h0 is None:
        h0 = v.new_zeros(len(spans), HV, k.shape[-1], V)
    elif given["state_v_first"]:
        h0 = h0.mT
    parts, states = {}, {}
    for members in runs(spans):
        chosen = [spans[n] for n in members]
        tensors = [pick(x, chosen) for x in (q, k, v, g, beta)]
        o, S = delta_rule(*tensors, h0[members].to(v.dtype), scale, pick(gk, chosen))
        for i, n in enumerate(members):
            parts[n], states[n] = o[i], S[i]
    # Sequences lie one after the other in one row, or each is a row.
    rows = [torch.cat([parts[n] for n, span in enumerate(spans) if span[0] == row], 1) for row in range(B)]
    final = torch.stack([states[n] for n in range(len(spans))]) if spans else h0
    return torch.stack(rows) if rows else v, final.mT if given["state_v_first"] else final


def _forward(op, given, spans):
    scale = check_options(op, given)
    tensors = [given[name] for name in ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")]
    o, final = _evaluate(*tensors, given.get("gk"), given, spans, scale)
    o = from_head_major(o.to(given["k"].dtype), given.get("out_layout") or given["layout"])
    return o, final if given["output_final_state"] else final.new_empty(0)


def _check_points(op, points, spans):
    if points.dim() != 2 or points.shape[1] != 2:
        refuse(op, "snapshot_at", "rows (sequence, tokens) [M, 2]", list(points.shape))
    for m, (n, tokens) in enumerate(points.tolist()):
        if not 0 <= n < len(spans):
            refuse(op, f"snapshot_at[{m}]", f"a sequence from 0 to {len(spans) - 1}", n)
        length = spans[n][2] - spans[n][1]
        if not 0 <= tokens <= length:
            refuse(op, f"snapshot_at[{m}]", f"0 to {length} tokens", tokens)


def _snapshots(given, spans, scale):
    """States after so many tokens of a sequence: the final states of runs that end there."""
    tensors = [given[name] for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")]
    *inputs, _ = prepare(*tensors, None, given)
    v, flip = inputs[2], given["state_v_first"]
    for n, tokens in given["snapshot_at"].tolist():
        row, begin, _ = spans[n]
        S = given["initial_state"]
        S = v.new_zeros(1, v.shape[1], given["k"].shape[-1], v.shape[-1]) if S is None else S[n : n + 1].to(v.dtype)
        part = [x[row : row + 1, :, begin : begin + tokens] for x in inputs]
        S = delta_rule(*part, S.mT if flip and given["initial_state"] is not None else S, scale)[1][0]
        yield S.mT if flip else S


def chunk_gated_delta_rule_fwd(**given):
    op = "chunk_gated_delta_rule_fwd"
    scale, spans, k, v = check_options(op, given), sequences(op, given), given["k"], given["v"]
    segments, points = given["time_segments"], given["snapshot_at"]
    if given["save_states"] and points is not None:
        refuse(op, "save_states", "False with snapshot_at", True)
    if segments < 1:
        refuse(op, "time_segments", ">= 1", segments)
    if segments > 1 and (points is not None or (given["cu_seqlens"] is None and len(spans) > 1)):
        refuse(op, "time_segments", "1 with snapshots or several rows", segments)
    if points is not None:
        _check_points(op, points, spans)
    o, final = _forward(op, given, spans)
    heads = v.shape[-3 if given["layout"] in ("BNSD", "NTD") else -2]
    tokens = k.shape[-2 if given["layout"] in ("BNSD", "NTD") else -3]
    state = (heads, k.shape[-1], v.shape[-1])
    if given["save_states"]:  # room only: the gradient below runs the forward again
        rows = len(spans) if given["cu_seqlens"] is None else 1
        return o, final, k.new_zeros((rows * ((max(tokens, 1) - 1) // SAVED_STATE_TOKENS), *state), dtype=wide(k))
    if points is None:
        return o, final, k.new_empty(0, dtype=wide(k))
    states = list(_snapshots(given, spans, scale))
    return o, final, torch.stack(states) if states else k.new_empty((0, *state), dtype=wide(k))


def chunk_gated_delta_rule_bwd(do, dfinal_state, **given):
    op = "chunk_gated_delta_rule_bwd"
    scale, spans, needs = check_options(op, given), sequences(op, given), given.pop("needs")
    if not 0 <= needs <= 255:
        refuse(op, "needs", "0 to 255 (a bit for every result)", needs)
    names = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
    inputs, sums = [given[name] for name in names], wide(given["k"])
    layout = given["out_layout"] or given["layout"]

    def forward(*tensors):
        o, final = _evaluate(*tensors, None, given, spans, scale)
        return from_head_major(o, layout), final

    asked = [bool(needs >> i & 1) for i in range(8)]
    wider = [None if x is None else x.to(sums) for x in inputs]
    found = pull_back(forward, wider, asked, (do, dfinal_state))
    types = [x.dtype for x in inputs[:3]] + [sums, inputs[4].dtype, sums, sums, sums]
    return tuple(
        given["k"].new_empty(0, dtype=dtype) if x is None else x.to(dtype)
        for x, dtype in zip(found, types, strict=True)
    )


def recurrent_gated_delta_rule_fwd(**given):
    op = "recurrent_gated_delta_rule_fwd"
    return _forward(op, given, sequences(op, given, steps=True))


def gdn_segment_map(**given):
    """The rule is linear in its state: phi is where a unit matrix goes without values, s where zero goes with them."""
    op = "gdn_segment_map"
    check_options(op, given)
    spans = sequences(op, given)
    tensors = [given[name] for name in ("k", "v", "g", "beta", "A_log", "dt_bias")]
    _, k, v, g, beta, _ = prepare(None, *tensors, None, given)
    HV, K, V = v.shape[1], k.shape[-1], v.shape[-1]
    unit = torch.cat([torch.eye(K, dtype=v.dtype), v.new_zeros(K, V)], 1).expand(1, HV, K, K + V)
    v = torch.cat([torch.zeros_like(k), v], -1)
    maps = [delta_rule(*[pick(x, [span]) for x in (k, k, v, g, beta)], unit, 1.0)[1] for span in spans]
    maps = torch.cat(maps) if maps else v.new_zeros(0, HV, K, K + V)
    return maps[..., :K], maps[..., K:]


def gdn_segment_combine(phi1, s1, phi2, s2):
    return phi2 @ phi1, phi2 @ s1 + s2

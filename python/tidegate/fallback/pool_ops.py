"""Operators that work on pools of states in place: the chunk form, the recurrence, a layer's decode step."""

import torch

from tidegate.fallback.checks import activation as parse_activation
from tidegate.fallback.checks import choice, entries, finite, from_head_major, refuse
from tidegate.fallback.conv import check_update, update_row
from tidegate.fallback.rows import gdn_gating_fwd, rms_norm_gated_fwd
from tidegate.fallback.rule import TOKENS, by_tokens, delta_rule
from tidegate.fallback.rule_inputs import check_options, pick, prepare, sequences


def _load(state, slot, given, dtype):
    S = state[slot : slot + 1].to(dtype)
    return S.mT if given["state_v_first"] else S


def _store(state, slot, S, given):
    if slot is not None:
        state[slot].copy_(S[0].mT if given["state_v_first"] else S[0])


def chunk_gated_delta_rule_pool(**given):
    op = "chunk_gated_delta_rule_pool"
    scale, spans, state = check_options(op, given), sequences(op, given), given["state"]
    slots = entries(op, "state_indices", given["state_indices"], len(spans))
    fresh = entries(op, "has_initial_state", given["has_initial_state"], len(spans))
    null, owner = given["null_slot"], {}
    for n, slot in enumerate(slots):
        if slot == null:
            continue
        if not 0 <= slot < len(state):
            refuse(op, f"state_indices[{n}]", f"0 to {len(state) - 1} or {null} (null slot)", slot)
        if owner.setdefault(slot, n) != n:
            refuse(op, f"state_indices[{n}]", "a slot of its own", f"{slot} (also of sequence {owner[slot]})")
    tensors = [given[name] for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")]
    q, k, v, g, beta, _ = prepare(*tensors, None, given)
    o = torch.zeros_like(v)
    for n, (row, begin, end) in enumerate(spans):
        if slots[n] == null:
            continue
        S = _load(state, slots[n], given, v.dtype)
        S = torch.zeros_like(S) if fresh is not None and not fresh[n] else S
        o[row, :, begin:end], S = delta_rule(*[pick(x, [spans[n]]) for x in (q, k, v, g, beta)], S, scale)
        _store(state, slots[n], S, given)
    return from_head_major(o.to(given["k"].dtype), given["out_layout"] or given["layout"])


def _check_slots(op, given, spans, slots_of_pool):
    """(slot to start from, list of slots to write to) of every sequence; None: nothing to read or write there."""
    indices, null = given["state_indices"], given["null_slot"]
    if indices.dim() not in (1, 2):
        refuse(op, "state_indices", "[N] or [N, M]", list(indices.shape))
    per_token, N = indices.dim() == 2, len(spans)
    if per_token and len(indices) != N:
        refuse(op, "state_indices", f"{N} rows (one per sequence)", len(indices))
    if per_token and indices.shape[1] == 0:
        refuse(op, "state_indices", "at least 1 column", 0)
    if not per_token and len(indices) != N:
        refuse(op, "state_indices", f"{N} entries (1 per sequence)", len(indices))
    table = indices.tolist() if per_token else [[slot] for slot in indices.tolist()]
    accepted = entries(op, "num_accepted_tokens", given["num_accepted_tokens"], N)
    fresh = entries(op, "has_initial_state", given.get("has_initial_state"), N)
    width = indices.shape[1] if per_token else 1
    name = lambda n, m: f"state_indices[{n}]" + (f"[{m}]" if per_token else "")  # noqa: E731
    plan = []
    for n, (_, begin, end) in enumerate(spans):
        for m, slot in enumerate(table[n]):
            if slot != null and not 0 <= slot < slots_of_pool:
                refuse(op, name(n, m), f"0 to {slots_of_pool - 1} or {null} (null slot)", slot)
        slots = [None if slot == null else slot for slot in table[n]]
        if begin == end:
            plan.append((None, [], True))
            continue
        if per_token and end - begin > width:
            refuse(op, "state_indices", f"at least {end - begin} entries for sequence {n} (its tokens)", width)
        a = 1 if accepted is None else accepted[n]
        if not 1 <= a <= width:
            refuse(op, f"num_accepted_tokens[{n}]", f"1 to {width} (states per sequence)", a)
        start = slots[a - 1]
        written = [] if start is None else slots[: end - begin] if per_token else slots
        plan.append((start, written, fresh is None or bool(fresh[n])))
    writers = {}
    for n, (_, written, _) in enumerate(plan):
        for m, slot in enumerate(written):
            if slot is not None and writers.setdefault(slot, n) != n:
                refuse(op, name(n, m), "a slot of its own", f"{slot} (also of sequence {writers[slot]})")
    for n, (start, _, _) in enumerate(plan):
        if start is not None and writers.get(start, n) != n:
            m = 0 if accepted is None else accepted[n] - 1
            refuse(op, name(n, m), "a slot of its own", f"{start} (also of sequence {writers[start]})")
    return plan, per_token


def recurrent_gated_delta_rule(**given):
    op = "recurrent_gated_delta_rule"
    scale, spans, state = check_options(op, given), sequences(op, given, steps=True), given["state"]
    plan, per_token = _check_slots(op, given, spans, len(state))
    tensors = [given[name] for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "gk")]
    q, k, v, g, beta, gk = prepare(*tensors, given)
    o = torch.zeros_like(v)
    starts = [None if start is None else _load(state, start, given, v.dtype).clone() for start, *_ in plan]
    for n, (row, begin, end) in enumerate(spans):
        start, written, kept = plan[n]
        if start is None:
            continue
        S = starts[n] if kept else torch.zeros_like(starts[n])
        part = [pick(x, [spans[n]]) for x in (q, k, v, g, beta)]
        plain = g is not None and gk is None and beta.dim() == 3
        if not per_token and end - begin > TOKENS and plain:
            o[row, :, begin:end], S = delta_rule(*part, S, scale)
        else:
            each = None
            if per_token:
                each = lambda t, S, written=written: _store(state, written[t], S, given)  # noqa: E731
            o[row, :, begin:end], S = by_tokens(*part, S, scale, pick(gk, [spans[n]]), state.dtype, each)
        if not per_token:
            _store(state, written[0], S, given)
    return from_head_major(o.to(given["k"].dtype), given["layout"])


def _split(given):
    """q, k, v as the convolution's channels [T,D], z [T,HV,V], a, b [T,HV]."""
    op, mixed, z, a, b = "gdn_packed_decode", given["mixed"], given["z"], given["a"], given["b"]
    HK, HV, K, V = (given[name] for name in ("HK", "HV", "K", "V"))
    T, G = len(mixed), HV // HK
    separate = choice(op, "projection", given["projection"], "qkv or qkvz_ba") == "qkv"
    for name in ("z", "a"):
        if separate and given[name] is None:
            refuse(op, name, "a tensor", "none")
        if not separate and given[name] is not None:
            refuse(op, name, "none with projection qkvz_ba", "a tensor")
    if b is None:
        refuse(op, "b", "a tensor", "none")
    if separate:
        return mixed, z.reshape(T, HV, V), a, b
    q, k, v, z = mixed.view(T, HK, -1).split([K, K, G * V, G * V], -1)
    b, a = b.view(T, HK, 2 * G).split([G, G], -1)
    return torch.cat([x.flatten(1) for x in (q, k, v)], 1), z.reshape(T, HV, V), a.flatten(1), b.flatten(1)


def decode_sizes(op, HK, HV, K, V, **_others):
    for name, size in (("HK", HK), ("HV", HV), ("K", K), ("V", V)):
        if size < 1:
            refuse(op, name, ">= 1", size)
    if HV % HK:
        refuse(op, "HV", f"a multiple of {HK} (HK)", HV)


def gdn_packed_decode(**given):
    """The operators it is named after, one after the other."""
    op, HK, HV, K, V = "gdn_packed_decode", *(given[name] for name in ("HK", "HV", "K", "V"))
    channels, z, a, b = _split(given)
    finite(op, "scale", K**-0.5 if given["scale"] is None else given["scale"])
    finite(op, "eps", given["eps"], 0)
    parse_activation(op, given["activation"], conv=False)
    choice(op, "norm_rounding", given["norm_rounding"], "hf or fp32")
    rule = {"layout": "TND", "cu_seqlens": given["cu_seqlens"], "k": channels[:, None], "gk": None}
    spans = sequences(op, rule, steps=True)
    plan, per_token = _check_slots(op, given, spans, len(given["state"]))
    if not per_token and any(end - begin > TOKENS for _, begin, end in spans):
        longest = max(end - begin for _, begin, end in spans)
        refuse(op, "cu_seqlens", f"at most {TOKENS} tokens per sequence", longest)
    state, W, owner = given["conv_state"], given["conv_weight"].shape[1], {}
    rows = entries(op, "conv_indices", given["conv_indices"], len(spans))
    accepted = entries(op, "num_accepted_tokens", given["num_accepted_tokens"], len(spans))
    if rows is None:
        first = given["state_indices"] if not per_token else given["state_indices"][:, 0]
        rows = first.tolist()
    for n, (start, *_) in enumerate(plan):
        if start is None:
            rows[n] = None
            continue
        if not 0 <= rows[n] < len(state):
            refuse(op, f"conv_indices[{n}]", f"0 to {len(state) - 1} (sequence {n} has a state)", rows[n])
        if owner.setdefault(rows[n], n) != n:
            refuse(op, f"conv_indices[{n}]", "a row of its own", f"{rows[n]} (also of another sequence)")
    check_update(op, state, W, [end - begin for _, begin, end in spans], rows, accepted)
    weight = given["conv_weight"].float()
    bias = None if given["conv_bias"] is None else given["conv_bias"].float()
    mixed, skipped = torch.zeros_like(channels), torch.ones(len(channels), dtype=torch.bool)
    for n, (_, begin, end) in enumerate(spans):
        if rows[n] is not None:
            count = None if accepted is None else accepted[n]
            x = channels[begin:end]
            mixed[begin:end] = update_row(x, state[rows[n]], weight, bias, "silu", "tail", count)
            skipped[begin:end] = False
    g, beta = gdn_gating_fwd(a, b, given["A_log"], given["dt_bias"], layout="TND")
    q, k, v = mixed.split([HK * K, HK * K, HV * V], 1)
    rule |= {"q": q.view(-1, HK, K), "k": k.view(-1, HK, K), "v": v.view(-1, HV, V), "g": g, "beta": beta}
    rule |= {"use_qk_l2norm": True, "beta_sigmoid": False, "beta_scale": 1.0, "A_log": None, "dt_bias": None}
    names = ("state", "state_indices", "num_accepted_tokens", "null_slot", "scale", "state_v_first")
    o = recurrent_gated_delta_rule(**rule, has_initial_state=None, **{name: given[name] for name in names})
    options = {"eps": given["eps"], "activation": given["activation"], "rounding": given["norm_rounding"]}
    y = rms_norm_gated_fwd(o, z, given["norm_weight"], **options)[0]
    return y.masked_fill(skipped[:, None, None], 0).flatten(1)

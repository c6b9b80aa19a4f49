"""Boundaries of packed sequences from any of their usual sources: the operator seqlens."""

import torch

from tidegate.fallback.checks import offsets, refuse

OP = "seqlens"


def _flat(name, ids):
    if ids.dim() == 3 and ids.shape[0] == 4:  # text positions stand first
        ids = ids[0]
    if not (ids.dim() == 1 or (ids.dim() == 2 and ids.shape[0] == 1)):
        refuse(OP, name, "[T] or [1, T]", list(ids.shape))
    return ids.flatten()


def _from_ids(ids):
    starts, used, values = [], set(), ids.tolist()
    for t, value in enumerate(values):
        if t == 0 or value != values[t - 1]:
            if value in used:
                refuse(OP, f"seq_idx[{t}]", "an id not used before", value)
            used.add(value)
            starts.append(t)
    return [*starts, len(values)] if values else [0]


def _from_positions(ids):
    if ids.dim() == 3 and ids.shape[0] == 3:
        if ids.shape[1] != 1:
            refuse(OP, "position_ids", "one row [3, 1, T]", list(ids.shape))
        rows = ids[:, 0]
    else:
        rows = _flat("position_ids", ids)[None]
    for i, value in enumerate(rows.flatten().tolist()):
        if value < 0:
            refuse(OP, f"position_ids[{i}]", ">= 0", value)
    tokens, p = rows.shape[1], rows[0].tolist()
    if len(rows) == 3:
        starts = [t for t in range(1, tokens) if not rows[:, t].any()]
    else:
        starts = [t for t in range(1, tokens) if p[t] != p[t - 1] + 1]
        for t in starts:
            if p[t] != p[0]:
                refuse(OP, f"position_ids[{t}]", f"{p[t - 1] + 1} (same sequence) or {p[0]} (new sequence)", p[t])
    return [0, *starts, tokens] if tokens else [0]


def seqlens(cu_seqlens=None, seq_idx=None, position_ids=None, tokens=0):
    """int32 [tokens + 1]: the offsets without empty sequences, then `tokens` over and over."""
    if tokens < 0:
        refuse(OP, "tokens", ">= 0", tokens)
    for name, ids in (("cu_seqlens", cu_seqlens), ("seq_idx", seq_idx), ("position_ids", position_ids)):
        if ids is not None and ids.dtype not in (torch.int32, torch.int64):
            got = str(ids.dtype).removeprefix("torch.")
            raise TypeError(f"{OP}: {name}: expected dtype int32 or int64, got dtype {got}")
    found = {}
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1:
            refuse(OP, "cu_seqlens", "1 dimension", cu_seqlens.dim())
        found["cu_seqlens"] = sorted(set(offsets(OP, cu_seqlens, tokens)))
    if seq_idx is not None:
        found["seq_idx"] = _from_ids(_flat("seq_idx", seq_idx))
    if position_ids is not None:
        found["position_ids"] = _from_positions(position_ids)
    if not found:
        refuse(OP, "cu_seqlens", "one of cu_seqlens, seq_idx and position_ids", "none")
    first, cu = next(iter(found.items()))
    for name, other in found.items():
        if other[-1] != tokens:
            refuse(OP, name, f"boundaries of {tokens} tokens", other[-1])
        for n, (a, b) in enumerate(zip(cu, other, strict=False)):
            if a != b:
                refuse(OP, name, f"{a} (end of sequence {n - 1} in {first})", b)
        if len(cu) != len(other):
            refuse(OP, name, f"{len(cu) - 1} sequences (as {first})", len(other) - 1)
    return torch.tensor(cu + [tokens] * (tokens + 1 - len(cu)), dtype=torch.int32)

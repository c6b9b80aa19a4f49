"""The causal convolution in plain torch: a sum of shifted samples, each looked up in its own sequence."""

import torch

from tidegate._contracts import LAYOUTS
from tidegate.fallback.checks import activation as parse_activation
from tidegate.fallback.checks import choice, entries, offsets, refuse, wide
from tidegate.fallback.gradients import pull_back


def _tokens(x, layout):
    """[B,T,D] from any layout."""
    x = x if "B" in LAYOUTS[layout] else x[None]
    return x if LAYOUTS[layout].endswith("T,H") else x.transpose(1, 2).flatten(2)


def _arranged(y, x, head_num, layout):
    """y [B,T,D] in the layout of x, or head-major."""
    B, T, D = y.shape
    if head_num:
        y = y.view(B, T, head_num, D // head_num).transpose(1, 2)
    elif not LAYOUTS[layout].endswith("T,H"):
        y = y.view(B, T, x.shape[-3], x.shape[-1]).transpose(1, 2)
    return y if "B" in LAYOUTS[layout] else y[0]


def _boundaries(op, cu_seqlens, B, T):
    """Offsets of the sequences in rows laid end to end."""
    if cu_seqlens is None:
        return [T * row for row in range(B + 1)]
    return offsets(op, cu_seqlens, T)


class _Samples:
    """Samples of packed sequences by their position: 0 is a sequence's first token, -1 the newest of its state."""

    def __init__(self, x, state, cu):
        """x [M,D]; state [N,D,S] or None."""
        self.cu, self.first = cu, len(x)
        self.length = 0 if state is None else state.shape[2]
        parts = [x] if state is None else [x, state.transpose(1, 2).flatten(0, 1)]
        self.all = torch.cat([*parts, x.new_zeros(1, x.shape[1])])

    def at(self, sequence, position):
        """Samples [..., D]. Those before everything that is known are 0."""
        S = self.length
        old = torch.where(position >= -S, self.first + sequence * S + S + position, len(self.all) - 1)
        return self.all[torch.where(position >= 0, self.cu[sequence] + position, old)]


def _convolve(x, weight, bias, state, cu, activation, state_len):
    """y [M,D] of x [M,D], and the last state_len samples of every sequence [N,D,state_len]."""
    cu = torch.tensor(cu)
    lengths = cu.diff()
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    position = torch.arange(len(x)) - cu[sequence]
    samples, W = _Samples(x, state, cu), weight.shape[1]
    y = torch.zeros_like(x) if bias is None else bias.expand_as(x)
    for j in range(W):
        y = y + weight[:, j] * samples.at(sequence, position - (W - 1) + j)
    y = y * torch.sigmoid(y) if activation == "silu" else y
    ends = lengths[:, None] - state_len + torch.arange(state_len)
    return y, samples.at(torch.arange(len(lengths))[:, None], ends).transpose(1, 2)


def causal_conv1d_fwd(
    x,
    weight,
    bias=None,
    initial_state=None,
    cu_seqlens=None,
    activation=None,
    head_num=0,
    output_final_state=False,
    state_len=0,
    layout="BSND",
):
    op = "causal_conv1d_fwd"
    activation = parse_activation(op, activation, conv=True)
    if state_len < 0:
        refuse(op, "state_len", ">= 0", state_len)
    tokens, dtype = _tokens(x, layout), wide(x)
    B, T, D = tokens.shape
    cu = _boundaries(op, cu_seqlens, B, T)
    length = state_len or (weight.shape[1] - 1 if initial_state is None else initial_state.shape[2])
    given = [None if t is None else t.to(dtype) for t in (tokens.reshape(B * T, D), weight, bias, initial_state)]
    y, final = _convolve(*given, cu, activation, length if output_final_state else 0)
    y = _arranged(y.view(B, T, D).to(x.dtype), x, head_num, layout)
    return y, final.to(x.dtype) if output_final_state else x.new_empty(0)


def causal_conv1d_bwd(
    dy,
    x,
    weight,
    bias=None,
    initial_state=None,
    dfinal_state=None,
    cu_seqlens=None,
    activation=None,
    head_num=0,
    layout="BSND",
):
    op = "causal_conv1d_bwd"
    activation = parse_activation(op, activation, conv=True)
    B, T, D = _tokens(x, layout).shape
    cu = _boundaries(op, cu_seqlens, B, T)
    length = 0 if dfinal_state is None else dfinal_state.shape[2]

    def forward(x, weight, bias, state):
        y, final = _convolve(_tokens(x, layout).reshape(B * T, D), weight, bias, state, cu, activation, length)
        return _arranged(y.view(B, T, D), x, head_num, layout), final

    given = [None if t is None else t.to(wide(x)) for t in (x, weight, bias, initial_state)]
    dx, dweight, dbias, dstate = pull_back(forward, given, [True] * 4, (dy, dfinal_state))
    dbias, dstate = (dweight.new_empty(0) if t is None else t for t in (dbias, dstate))
    return dx.to(x.dtype), dweight, dbias, dstate.to(x.dtype)


def check_update(op, conv_state, W, lengths, rows, accepted):
    """Whether the rows are long enough for what was accepted and for what comes."""
    S = conv_state.shape[2]
    for n, length in enumerate(lengths):
        if rows[n] is None or length == 0 or accepted is None:
            continue
        if not 1 <= accepted[n] <= S - W + 2:
            refuse(op, f"num_accepted_tokens[{n}]", f"1 to {S - W + 2} (state length {S})", accepted[n])
        if length > S - W + 2:
            needed = f"state length >= {W - 2 + length} for {length} tokens of sequence {n}"
            refuse(op, "conv_state", needed, S)


def update_row(x, row, weight, bias, activation, anchor, accepted=None, written=None):
    """y [L,D] of samples x [L,D] on a state row [D,S], which changes. accepted, written: the other two modes."""
    L, S, W = len(x), row.shape[1], weight.shape[1]
    columns = torch.arange(W - 1)
    if accepted is not None:
        columns = columns + accepted - 1
    elif written is not None:
        columns = (columns + written - (W - 1)) % S
    elif anchor == "tail":
        columns = columns + S - (W - 1)
    history = row[:, columns]
    state = history.to(weight.dtype)[None]
    y, _ = _convolve(x.to(weight.dtype), weight, bias, state, [0, L], activation, 0)
    if accepted is not None:
        row[:, : W - 2], row[:, W - 2 : W - 2 + L] = history[:, 1:], x.T
    elif written is not None:
        last = torch.arange(max(0, L - S), L)  # of several samples for a column the newest stays
        row[:, (written + last) % S] = x[last].T
    elif anchor == "head":
        row[:, : W - 1] = torch.cat([history, x.T], 1)[:, L:]
    else:
        row.copy_(torch.cat([row, x.T], 1)[:, L:])
    return y.to(x.dtype)


def causal_conv1d_update(
    x,
    conv_state,
    weight,
    bias=None,
    cu_seqlens=None,
    cache_indices=None,
    has_initial_state=None,
    num_accepted_tokens=None,
    cache_seqlens=None,
    pad_slot_id=-1,
    state_anchor="tail",
    activation=None,
    head_num=0,
    layout="TND",
):
    op = "causal_conv1d_update"
    activation = parse_activation(op, activation, conv=True)
    choice(op, "state_anchor", state_anchor, "tail or head")
    if not LAYOUTS[layout].endswith("T,H"):
        refuse(op, "layout", "TND or BSND", "a head-major one")
    if num_accepted_tokens is not None and cache_seqlens is not None:
        refuse(op, "cache_seqlens", "none together with num_accepted_tokens", "both")
    if state_anchor == "head" and (num_accepted_tokens is not None or cache_seqlens is not None):
        refuse(op, "state_anchor", "tail together with num_accepted_tokens or cache_seqlens", "head")
    tokens = _tokens(x, layout)
    B, T, D = tokens.shape
    cu = _boundaries(op, cu_seqlens, B, T)
    N, slots = len(cu) - 1, conv_state.shape[0]
    lengths = [end - begin for begin, end in zip(cu, cu[1:], strict=False)]
    rows = entries(op, "cache_indices", cache_indices, N)
    fresh = entries(op, "has_initial_state", has_initial_state, N)
    accepted = entries(op, "num_accepted_tokens", num_accepted_tokens, N)
    written = entries(op, "cache_seqlens", cache_seqlens, N)
    if rows is None and slots < N:
        refuse(op, "conv_state", f"at least {N} rows (sequences)", slots)
    rows = list(range(N)) if rows is None else rows
    owner = {}
    for n, row in enumerate(rows):
        if cache_indices is not None and row == pad_slot_id:
            rows[n] = None
            continue
        if not 0 <= row < slots:
            refuse(op, f"cache_indices[{n}]", f"{pad_slot_id} or 0 to {slots - 1}", row)
        if lengths[n] and owner.setdefault(row, n) != n:
            refuse(op, f"cache_indices[{n}]", "a row of its own", f"{row} as in [{owner[row]}]")
        if written is not None and written[n] < 0:
            refuse(op, f"cache_seqlens[{n}]", ">= 0", written[n])
    check_update(op, conv_state, weight.shape[1], lengths, rows, accepted)
    flat, dtype = tokens.reshape(B * T, D), wide(x)
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    y = torch.zeros_like(flat)
    for n, row in enumerate(rows):
        if row is None or lengths[n] == 0:
            continue
        if fresh is not None and not fresh[n]:
            conv_state[row].zero_()
        y[cu[n] : cu[n + 1]] = update_row(
            flat[cu[n] : cu[n + 1]],
            conv_state[row],
            weight,
            bias,
            activation,
            state_anchor,
            None if accepted is None else accepted[n],
            None if written is None else written[n] % conv_state.shape[2],
        )
    return _arranged(y.view(B, T, D), x, head_num, layout)

"""Where the sequences of a packed batch begin: read from every source that was given, compared, checked once a forward.

`boundaries` is a custom operator, so that a compiled graph holds the checks too: values are looked at when it runs. It
raises PackedInputError there as it does in eager mode.
"""

import re

import torch

from tidegate._native import ops
from tidegate.errors import PackedInputError

_TEXT = re.compile(r"seqlens: (?P<name>\w+)(?P<index>\[\d+\])?: expected (?P<expected>.*), got (?P<got>.*)")


def _reworded(text, name):
    """An error of the native operator as this layer says it: the caller's name of the tensor, index, value, rule."""
    found = _TEXT.match(text)
    if found is None:
        return text
    index, expected, got = found["index"] or "", found["expected"], found["got"]
    if index and expected.startswith(">= ") and name.startswith("cu_"):
        before = f"{name}[{int(index[1:-1]) - 1}]={expected[3:]}"
        return f"{name}{index}={got} is smaller than {before}; lengths must not decrease"
    if index:
        return f"{name}{index}={got}, expected {expected}"
    return f"{name}: expected {expected}, got {got}"


def _native(name, argument, tensor, tokens):
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise PackedInputError(f"{name}: expected int32 or int64, got {tensor.dtype}")
    if argument == "cu_seqlens" and tensor.dim() != 1:
        raise PackedInputError(f"{name}: expected shape [N+1], got {list(tensor.shape)}")
    try:
        return ops.seqlens(**{argument: tensor}, tokens=tokens)
    except (ValueError, TypeError) as error:
        raise PackedInputError(_reworded(str(error), name)) from None


def _of_images(position_ids):
    """Whether they are the rows time, height and width alone, without one for the text."""
    return position_ids.dim() == 3 and position_ids.shape[0] == 3


def starts_of(position_ids):
    """Where positions restart, as bool [B,T]; jumps that are no restart do not count. The first token is no restart."""
    if _of_images(position_ids):
        return _restarts(position_ids, None)
    row = position_ids[0] if position_ids.dim() == 3 else position_ids
    starts = torch.zeros_like(row, dtype=torch.bool)
    starts[:, 1:] = (row[:, 1:] != row[:, :-1] + 1) & (row[:, 1:] == row[:, :1])
    return starts


def _padded(starts, tokens):
    """Boundaries from starts [T], filled up with T as the native operator does."""
    cu = torch.full((tokens + 1,), tokens, dtype=torch.int32)
    begins = starts.nonzero().view(-1)
    cu[0] = 0
    cu[1 : 1 + len(begins)] = begins.to(torch.int32)
    return cu


def _from_positions(position_ids, tokens, strict):
    if strict:
        cu = _native("position_ids", "position_ids", position_ids, tokens)
        if _of_images(position_ids):  # the operator looks for zeros only
            others = (starts_of(position_ids) & (position_ids != 0).any(0)).nonzero()
            if len(others):
                at = int(others[0, 1])
                before, here = (position_ids[:, 0, t].tolist() for t in (at - 1, at))
                raise PackedInputError(
                    f"position_ids[:,0,{at}]={here} after {before}, expected [0, 0, 0] (new sequence) or no way back"
                )
        return cu
    if position_ids.shape[-1] != tokens:
        raise PackedInputError(f"position_ids: expected {tokens} tokens, got {position_ids.shape[-1]}")
    return _padded(starts_of(position_ids)[0], tokens)


def _check_agreement(name, cu, other_name, other, tokens):
    if torch.equal(cu, other):
        return
    at = int((cu != other).nonzero()[0])
    counts = [int((c < tokens).sum()) for c in (cu, other)]
    raise PackedInputError(
        f"{name} and {other_name} disagree: boundary {at} is {cu[at]} in {name}, {other[at]} in {other_name} "
        f"(T={tokens}, N={counts[0]} vs {counts[1]})"
    )


def _check_values(attention_mask):
    """Numbers of segments in a mask would be taken for ones."""
    strange = ((attention_mask != 0) & (attention_mask != 1)).nonzero()
    if len(strange):
        index = ",".join(str(i) for i in strange[0].tolist())
        value = attention_mask[tuple(strange[0])].item()
        raise PackedInputError(f"attention_mask[{index}]={value}, expected 0 or 1; pass ids of samples as seq_idx")


def check_mask(attention_mask):
    """A mask next to packed input may only say that all tokens are real."""
    _check_values(attention_mask)
    zeros = (attention_mask == 0).nonzero()
    if len(zeros):
        index = ",".join(str(i) for i in zeros[0].tolist())
        raise PackedInputError(f"attention_mask[{index}]=0, expected 1: packed input has no padding; drop these tokens")


@torch.library.custom_op(
    "tidegate_packed::boundaries",
    mutates_args=(),
    schema="(Tensor? cu_seq_lens_q, Tensor? cu_seq_lens_k, Tensor? seq_idx, Tensor? position_ids, "
    "Tensor? attention_mask, *, SymInt tokens, SymInt max_length_q=-1, SymInt max_length_k=-1, "
    "bool strict_positions=True) -> (Tensor, Tensor, Tensor)",
)
def boundaries(
    cu_seq_lens_q,
    cu_seq_lens_k,
    seq_idx,
    position_ids,
    attention_mask,
    *,
    tokens,
    max_length_q=-1,
    max_length_k=-1,
    strict_positions=True,
):
    """cu int32 [T+1] padded with T, seq_idx int32 [1,T] and positions int64 [1,T], as all sources say."""
    found = []
    for name, argument, tensor in (
        ("cu_seq_lens_q", "cu_seqlens", cu_seq_lens_q),
        ("cu_seq_lens_k", "cu_seqlens", cu_seq_lens_k),
        ("seq_idx", "seq_idx", seq_idx),
    ):
        if tensor is not None:
            found.append((name, _native(name, argument, tensor, tokens)))
    if position_ids is not None:
        found.append(("position_ids", _from_positions(position_ids, tokens, strict_positions)))
    (name, cu), *others = found
    for other in others:
        _check_agreement(name, cu, *other, tokens)
    if attention_mask is not None:
        check_mask(attention_mask)
    longest = int(cu.diff().max()) if tokens else 0
    for given_name, given in (("max_length_q", max_length_q), ("max_length_k", max_length_k)):
        if 0 <= given < longest:
            raise PackedInputError(
                f"{given_name}={given} is smaller than the longest sequence, which has {longest} tokens"
            )
    token = torch.arange(tokens)
    ids = torch.searchsorted(cu[1:], token, right=True)
    return cu, ids.to(torch.int32)[None], (token - cu[ids])[None]


@boundaries.register_fake
def _(cu_seq_lens_q, cu_seq_lens_k, seq_idx, position_ids, attention_mask, *, tokens, **_options):
    made = torch.empty
    return made(tokens + 1, dtype=torch.int32), made(1, tokens, dtype=torch.int32), made(1, tokens, dtype=torch.int64)


def _restarts(position_ids, attention_mask):
    """Where positions restart or go back from one real token to the next, as bool [B,T]. Those of padding mean nothing.

    Rows without one for the text are those of images: height and width go back and forth there, but time stays or
    grows from token to token, and no two tokens have the same three numbers.
    """
    images = _of_images(position_ids)
    rows = position_ids if images else position_ids[:1] if position_ids.dim() == 3 else position_ids[None]
    real = torch.ones_like(rows[0], dtype=torch.bool)
    if attention_mask is not None:  # that of a cache is longer
        real = attention_mask[:, -rows.shape[-1] :] != 0
        batch = torch.broadcast_shapes(rows.shape[1:], real.shape)
        rows, real = rows.expand(-1, *batch), real.expand(batch)
    token = torch.arange(rows.shape[-1]).expand_as(real)
    last = torch.where(real, token, -1).cummax(1).values  # the last real token up to each one
    before = rows.gather(2, last[:, :-1].clamp(min=0).expand(len(rows), -1, -1))
    first = rows.gather(2, real.int().argmax(1, keepdim=True).expand(len(rows), -1, -1))
    here, starts = rows[:, :, 1:], torch.zeros_like(real)
    back = (here[0] < before[0]) | ((here == first).all(0) & (here != before + 1).any(0))
    if images:
        back |= (here == 0).all(0)
    starts[:, 1:] = back & real[:, 1:] & (last[:, :-1] >= 0)
    return starts


@torch.library.custom_op(
    "tidegate_packed::unpacked_positions",
    mutates_args=(),
    schema="(Tensor position_ids, Tensor? attention_mask) -> Tensor",
)
def unpacked_positions(position_ids, attention_mask):
    """The positions, once it is known that they do not restart and that a mask is one of padding."""
    if attention_mask is not None:
        _check_values(attention_mask)
    restarts = _restarts(position_ids, attention_mask).nonzero()
    if len(restarts):
        how = "padding_free=True (separate sequences) or "
        if position_ids.dim() > 1 and position_ids.shape[-2] > 1:
            how = "the samples in one row (tidegate.pack), or padding_free="
        raise PackedInputError(
            f"position_ids restart at token {int(restarts[0, -1])} but padding_free is not set. "
            f"Pass {how}False (one sequence)"
        )
    return position_ids.clone()  # used, so that a compiled graph keeps the check


unpacked_positions.register_fake(lambda position_ids, attention_mask: torch.empty_like(position_ids))


@torch.library.custom_op("tidegate_packed::padding_mask", mutates_args=(), schema="(Tensor attention_mask) -> Tensor")
def padding_mask(attention_mask):
    """The mask, once it is known to be one of padding."""
    _check_values(attention_mask)
    return attention_mask.clone()


padding_mask.register_fake(lambda attention_mask: torch.empty_like(attention_mask))

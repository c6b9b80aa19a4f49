"""A batch as one flat row of real tokens: packed rows as they are, others row after row without their padding."""

import dataclasses

import torch

from tidegate.errors import SequenceParallelError
from tidegate.packed.forward import prepare

IGNORED = -100  # a label without a loss
TOKENS = ("input_ids", "inputs_embeds", "labels", "shift_labels")  # [B,T] or [B,T,...]
CHECKED = ("attention_mask", "position_ids", "use_cache", "past_key_values", "padding_free")
METADATA = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "max_length_q", "max_length_k")


@dataclasses.dataclass
class Batch:
    """tokens: what lies along the flat row, by name, [1,T] or [1,T,...]; positions [1,T] or [rows,1,T]."""

    tokens: dict
    positions: torch.Tensor
    cu: tuple
    shape: tuple
    kept: torch.Tensor | None
    others: dict  # arguments that are the same on all ranks

    @property
    def items(self):
        """How many tokens have a loss."""
        labels = self.tokens.get("shift_labels")
        return None if labels is None else int((labels != IGNORED).sum())


def _trim(arguments, T):
    """Without the tokens at the end whose position is negative: a trainer's padding for equal shards."""
    positions = arguments.get("position_ids")
    if positions is None or positions.dim() == 0 or positions.shape[-1] != T or not bool((positions < 0).any()):
        return arguments, T
    real = (positions.reshape(-1, T) >= 0).all(0)
    count = int(real.sum())
    if bool(real[count:].any()):
        return arguments, T  # not at the end: refused later
    trimmed = {}
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor) and name in ("position_ids", "seq_idx"):
            x = x[..., :count]
        elif isinstance(x, torch.Tensor) and name in (*TOKENS, "attention_mask"):
            x = x[:, :count]
        trimmed[name] = x
    return trimmed, count


def _kept(mask, T):
    """[B,T], True for real tokens; None: all are."""
    if mask is None:
        return None
    if mask.dim() != 2:
        raise SequenceParallelError(f"attention_mask: expected [B,T] or none, got {list(mask.shape)}")
    kept = mask[:, -T:] != 0
    if bool(kept.all()):
        return None
    edges = (kept[:, 1:] != kept[:, :-1]).sum(1) + kept[:, 0].int() + kept[:, -1].int()
    if bool((edges > 2).any()):
        row = int((edges > 2).nonzero()[0])
        raise SequenceParallelError(
            f"attention_mask[{row}]: expected padding at the ends only, got some between tokens"
        )
    return kept


def _shifted(labels):
    """labels[t + 1] at t, row by row."""
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def _refuse_strangers(others):
    for name, value in others.items():
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            raise SequenceParallelError(
                f"{name}: a tensor of shape {list(value.shape)} that sequence parallelism does not know how to cut"
            )
        if name == "logits_to_keep" and not (isinstance(value, int) and value == 0):
            raise SequenceParallelError(f"logits_to_keep: expected 0, got {value}: every rank keeps its own tokens")


def read(arguments, padding_free, why_not):
    """The batch of a model's forward, checked. `why_not()`: see packed.forward.prepare."""
    arguments = {name: value for name, value in arguments.items() if value is not None}
    like = arguments.get("input_ids", arguments.get("inputs_embeds"))
    if like is None or ("input_ids" in arguments and "inputs_embeds" in arguments):
        raise SequenceParallelError("expected exactly one of input_ids and inputs_embeds")
    if like.dim() != (2 if "input_ids" in arguments else 3):
        raise SequenceParallelError(f"expected input_ids [B,T] or inputs_embeds [B,T,H], got {list(like.shape)}")
    if "input_ids" in arguments and (like.is_floating_point() or like.dtype == torch.bool):
        raise SequenceParallelError(f"input_ids: expected integers, got {like.dtype}")
    if arguments.get("use_cache") or "past_key_values" in arguments:
        raise SequenceParallelError(
            "sequence parallelism has no cache: call with use_cache=False; to generate, undo() it first"
        )
    B, T = like.shape[:2]
    for name in TOKENS:
        if name in arguments and arguments[name].shape[:2] != (B, T):
            raise SequenceParallelError(f"{name}: expected [{B}, {T}], got {list(arguments[name].shape)}")
    arguments, T = _trim(arguments, T)
    others = {n: v for n, v in arguments.items() if n not in (*TOKENS, *CHECKED, *METADATA)}
    _refuse_strangers(others)
    known = {name: arguments[name] for name in (*CHECKED, *METADATA) if name in arguments}
    checked = prepare(padding_free, why_not, known, B, T)
    tokens = {name: arguments[name] for name in TOKENS if name in arguments}
    if "labels" in tokens and "shift_labels" not in tokens:
        tokens["shift_labels"] = _shifted(tokens["labels"])
    positions = checked.get("position_ids")
    if checked.get("cu_seq_lens_q") is not None:
        cu = torch.unique_consecutive(checked["cu_seq_lens_q"]).tolist()
        return Batch(tokens, positions, tuple(cu), (1, T), None, others)
    if positions is None:
        positions = torch.arange(T, device=like.device)[None].expand(B, T)
    return _flat(
        tokens, positions.expand(*positions.shape[:-2], B, T), _kept(checked.get("attention_mask"), T), (B, T), others
    )


def _refuse_labels_from_padding(shifted, kept):
    """Padding is not computed, so nothing may be predicted from it."""
    lost = None if shifted is None else ((shifted != IGNORED) & ~kept).nonzero()
    if lost is not None and len(lost):
        row, token = lost[0].tolist()
        raise SequenceParallelError(
            f"labels[{row},{token + 1}]: expected {IGNORED}, got {int(shifted[row, token])}: the token before it is "
            "padding, which sequence parallelism drops"
        )


def _flat(tokens, positions, kept, shape, others):
    B, T = shape
    places, lengths = None, [T] * B
    if kept is not None:
        places, lengths = kept.flatten().nonzero()[:, 0], kept.sum(1).tolist()
        _refuse_labels_from_padding(tokens.get("shift_labels"), kept)

    def row(x, first):
        """Dimensions first and first + 1 are [B,T]."""
        x = x.flatten(first, first + 1)
        return (x if places is None else x.index_select(first, places)).unsqueeze(first)

    cu = [0]
    for length in lengths:
        cu += [cu[-1] + length] if length else []
    flat = {name: row(x, 0) for name, x in tokens.items()}
    return Batch(flat, row(positions, positions.dim() - 2), tuple(cu), shape, places, others)

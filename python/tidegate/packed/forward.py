"""What a text model's forward does first: decide whether its input is packed, check it, and tell every layer the same.

The boundaries travel as keyword arguments (`cu_seq_lens_q` and the rest): activation checkpointing calls layers again
after the model has returned, so nothing may be kept aside for them.
"""

import torch

from tidegate.errors import PackedInputError
from tidegate.packed.sources import boundaries, padding_mask, unpacked_positions

METADATA = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
LENGTHS = ("max_length_q", "max_length_k")
# Names of other functions, which a model would drop in silence.
MISTAKEN = ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seqlens_k", "segment_ids", "seq_ids")


def _tensor(name, value):
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        raise PackedInputError(f"{name}: expected a tensor on cpu, got one on {value.device}")
    if value is None or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (list, tuple)):
        return torch.tensor(value, dtype=torch.int32)
    raise PackedInputError(f"{name}: expected a tensor or a list, got {type(value).__name__}")


def _positions(position_ids, tokens):
    """position_ids as the model wants them, [T] as [1,T]; their rank says what they are."""
    if position_ids is None:
        return None
    shape = list(position_ids.shape)
    if len(shape) == 1:
        position_ids = position_ids[None]
    elif not (len(shape) == 2 or (len(shape) == 3 and shape[0] in (3, 4))):
        raise PackedInputError(f"position_ids: expected [T], [B,T], [3,B,T] or [4,B,T], got {shape}")
    if shape[-1] != tokens:
        raise PackedInputError(f"position_ids: expected {tokens} tokens, got {shape[-1]} (shape {shape})")
    return position_ids


def _refuse_cache(use_cache, past_key_values):
    if use_cache or past_key_values is not None:
        given = "use_cache=True" if use_cache else "past_key_values"
        raise PackedInputError(f"packed input cannot fill a cache; call with use_cache=False (got {given})")


def _visible(mask):
    """bool [B,T,T] out of a mask [B,1,T,keys] whose first keys are the tokens: which of them each query sees.

    A query that sees all keys and is not the last of them sees none: some releases make such rows of padding.
    """
    sees = (mask if mask.dtype == torch.bool else mask == 0).any(1)
    tokens, keys = sees.shape[1:]
    blank = sees.all(2)
    blank[:, keys - 1 :] = False
    return (sees & ~blank[..., None])[:, :, :tokens]


def _refuse_hidden(mask, tokens, past):
    """A mask of four dimensions that hides from a token what earlier ones saw: samples in one row, most likely. Linear
    attention has no such mask, so one sample would see the other."""
    if isinstance(mask, dict):
        mask = mask.get("full_attention")
    first = past is None or (hasattr(past, "get_seq_length") and int(past.get_seq_length()) == 0)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.shape[-1] < tokens or not first:
        return
    sees = _visible(mask)
    if sees.shape[1] != tokens:
        return
    rows = (sees & ~torch.eye(tokens, dtype=torch.bool)).any(2)  # one that sees itself alone may be padding
    sees = sees & rows[..., None]
    hidden = (sees.to(torch.uint8).cummax(1).values.bool() & ~sees & rows[..., None]).nonzero()
    if len(hidden):
        row, query, key = hidden[0].tolist()
        raise PackedInputError(
            f"attention_mask[{row}]: token {query} does not see token {key}, which tokens before it see; linear "
            "attention cannot hide it. Pass the boundaries of samples instead (cu_seq_lens_q, seq_idx, position_ids), "
            "or padding_free=False for one sequence"
        )


def _real(mask, past, tokens):
    """(whether a mask says which tokens are padding, [B,T] of real tokens or None: all are)."""
    each = list(mask.values()) if isinstance(mask, dict) else [mask]
    masks = {m.dim(): m for m in each if isinstance(m, torch.Tensor) and m.shape[-1] >= tokens}
    if mask is None or 2 in masks:
        return True, masks.get(2)
    if past is None:
        return True, None
    # With a cache they are those of generate(), which may pad. Only in the first call the keys are known to be tokens.
    if 4 not in masks or torch.compiler.is_compiling() or not hasattr(past, "get_seq_length"):
        return False, None
    return (True, _visible(masks[4]).any(1)) if int(past.get_seq_length()) == 0 else (False, None)


def prepare(padding_free, why_not, arguments, batch, tokens):
    """The keyword arguments of a text model's forward with the packed ones checked and complete, or checked to be none.

    `why_not()` says why this model cannot be packed (empty: it can).
    """
    arguments = dict(arguments)
    for name in MISTAKEN:
        if arguments.get(name) is not None:
            raise PackedInputError(f"{name}: a model takes boundaries as cu_seq_lens_q (and cu_seq_lens_k)")
    padding_free = arguments.pop("padding_free", padding_free)
    given = {name: _tensor(name, arguments.pop(name, None)) for name in METADATA}
    lengths = {name: arguments.pop(name, None) for name in LENGTHS}
    named = [name for name in METADATA if given[name] is not None]
    positions = arguments["position_ids"] = _positions(arguments.get("position_ids"), tokens)
    mask = arguments.get("attention_mask")
    if padding_free is False:
        if named:
            raise PackedInputError(f"{named[0]} is given but padding_free is False; leave out one of them")
        return arguments
    if not padding_free and not named:
        flat = isinstance(mask, torch.Tensor) and mask.dim() == 2
        known, real = _real(mask, arguments.get("past_key_values"), tokens) if tokens > 1 else (False, None)
        if positions is not None and known:
            arguments["position_ids"] = unpacked_positions(positions, real)
        elif flat and known:
            arguments["attention_mask"] = padding_mask(mask)
        if tokens > 1 and not torch.compiler.is_compiling():
            _refuse_hidden(mask, tokens, arguments.get("past_key_values"))
        return arguments
    if not named and positions is None:
        raise PackedInputError(
            "padding_free is True but nothing says where sequences begin: pass position_ids, cu_seq_lens_q or seq_idx"
        )
    refusal = why_not()
    if refusal:
        raise PackedInputError(f"this model cannot run packed input: {refusal}")
    if batch != 1:
        raise PackedInputError(f"packed input needs batch size 1, got {batch}; pack the samples with tidegate.pack")
    _refuse_cache(arguments.get("use_cache"), arguments.get("past_key_values"))
    if mask is not None and (isinstance(mask, dict) or mask.dim() != 2):
        raise PackedInputError(
            "attention_mask: packed input takes none, or [1,T] of ones; its boundaries say which tokens meet"
        )
    cu, seq_idx, made = boundaries(
        *given.values(),
        positions,
        mask,
        tokens=tokens,
        **{name: -1 if value is None else int(value) for name, value in lengths.items()},
        strict_positions=bool(padding_free),
    )
    lengths = {name: tokens if value is None else value for name, value in lengths.items()}
    if positions is None:
        positions = made
    elif positions.dim() == 3 and positions.shape[0] == 3:  # Transformers' masks see restarts in a row for the text
        positions = torch.cat([made[None], positions])
    arguments.update(attention_mask=None, use_cache=False, position_ids=positions)
    return {**arguments, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "seq_idx": seq_idx, **lengths}

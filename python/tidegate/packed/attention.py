"""Block-diagonal causal attention: every sequence of a packed batch attends to itself, one kernel call a sequence.

The cost is the sum of the squared lengths, no T x T mask is made, and KV heads are shared inside the kernel.
"""

import functools
import inspect
from itertools import pairwise

import torch

from tidegate.errors import PackedInputError
from tidegate.packed import step

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _sequences(cu, tokens):
    """(begin, end) of every sequence that has tokens."""
    cu = cu.tolist()
    if not cu or cu[0] != 0 or cu[-1] != tokens or any(b < a for a, b in pairwise(cu)):
        raise PackedInputError(
            f"cu_seq_lens_q must rise from 0 to {tokens} (tokens), got {cu[:8]}{'...' * (len(cu) > 8)}"
        )
    return [(a, b) for a, b in pairwise(cu) if a < b]


def _token_major(x):
    """Memory [1,T,H,D] seen as [1,H,T,D]: the layout that the model's next reshape wants."""
    batch, heads, tokens, width = x.shape
    return x.new_empty(batch, tokens, heads, width).transpose(1, 2)


@torch.library.custom_op(
    "tidegate_packed::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, float scale) -> (Tensor, Tensor)",
)
def packed_attention(q, k, v, cu_seqlens, scale):
    """q [1,H,T,D], k and v [1,Hkv,T,D] -> output like q and the logarithms of its softmax sums [1,H,T]."""
    out, lse = _empty(q)
    for begin, end in _sequences(cu_seqlens, q.shape[2]):
        part = slice(begin, end)
        o, s = _forward(q[:, :, part], k[:, :, part], v[:, :, part], 0.0, True, scale=scale)
        out[:, :, part] = o
        lse[:, :, part] = s
    return out, lse


def _empty(q):
    batch, heads, tokens, _ = q.shape
    lse = q.new_empty(batch, tokens, heads, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return _token_major(q), lse.transpose(1, 2)


packed_attention.register_fake(lambda q, k, v, cu_seqlens, scale: _empty(q))


@torch.library.custom_op(
    "tidegate_packed::attention_bwd",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens, float scale) -> "
    "(Tensor, Tensor, Tensor)",
)
def packed_attention_bwd(grad, q, k, v, out, lse, cu_seqlens, scale):
    grads = _token_major(q), _token_major(k), _token_major(v)
    for begin, end in _sequences(cu_seqlens, q.shape[2]):
        g, *qkv, o, s = (x[:, :, begin:end] for x in (grad, q, k, v, out, lse))
        for whole, part in zip(grads, _backward(g, *qkv, o, s, 0.0, True, scale=scale), strict=True):
            whole[:, :, begin:end] = part
    return grads


@packed_attention_bwd.register_fake
def _(grad, q, k, v, out, lse, cu_seqlens, scale):
    return _token_major(q), _token_major(k), _token_major(v)


def _save(ctx, inputs, output):
    q, k, v, cu_seqlens, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad, _grad_lse):
    dq, dk, dv = packed_attention_bwd(grad, *ctx.saved_tensors, ctx.scale)
    return dq, dk, dv, None, None


packed_attention.register_autograd(_differentiate, setup_context=_save)


@functools.cache
def _options_of_sdpa():
    """Keywords that Transformers' function acts on, beside those that every call has."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    usual = "module query key value attention_mask dropout scaling is_causal kwargs".split()
    return {*inspect.signature(sdpa_attention_forward).parameters, "softcap", "output_attentions"} - {*usual}


def attention_forward(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    is_causal=None,
    cu_seq_lens_q=None,
    sequence_parallel=None,
    **kwargs,
):
    """An attention function of Transformers: SDPA as it is there but for decode steps, block-diagonal where boundaries
    are given, and over several processes where a plan of sequence parallelism is."""
    if cu_seq_lens_q is None and sequence_parallel is None:
        asked = (kwargs[name] for name in _options_of_sdpa() & kwargs.keys())
        special = any(value is not None and value is not False for value in asked)
        if not special and step.serves(query, key, value, attention_mask, dropout):
            scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
            return step.step_attention(query, key, value, attention_mask, scale), None
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    _check(module, query, key, value, attention_mask if sequence_parallel is None else None, dropout, is_causal)
    if torch.is_autocast_enabled("cpu"):  # as SDPA does; tables of positions may have left q and k in fp32
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if sequence_parallel is not None:
        from tidegate.parallel.attention import attend

        return attend(sequence_parallel, query, key, value, scale).contiguous(), None
    out, _ = packed_attention(query, key, value, cu_seq_lens_q, scale)
    return out.transpose(1, 2).contiguous(), None


def _check(module, query, key, value, attention_mask, dropout, is_causal):
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:
        raise PackedInputError(
            "packed input takes no attention mask; its boundaries say which tokens meet. tidegate.patch the model: "
            "without that a mask is made as soon as positions restart"
        )
    if dropout:
        raise PackedInputError(f"packed attention has no dropout, got attention_dropout={dropout}; set it to 0")
    if not causal:
        raise PackedInputError("packed attention is causal, the module's is_causal is False")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise PackedInputError(
            f"packed attention needs one row of tokens and no cache, got q {list(query.shape)}, k {list(key.shape)}"
        )
    if value.shape[-1] != query.shape[-1]:
        raise PackedInputError(
            f"packed attention needs values as wide as queries ({query.shape[-1]}), got {value.shape[-1]}"
        )


def attention_mask(*args, **kwargs):
    """A mask function of Transformers: none where every token sees all before it, else the mask that SDPA gets there.

    The stock function builds a T x T mask as soon as positions restart, in a compiled graph even when they do not.
    Whether restarts are boundaries is decided once, by the model's forward (`forward.py`), not here.
    """
    from transformers.masking_utils import sdpa_mask

    position = kwargs.get("cache_position")  # up to Transformers 5.3 in place of q_length
    q_length = kwargs.get("q_length") if position is None else position.shape[0]
    plain = (
        kwargs.get("attention_mask") is None
        and kwargs.get("local_size") is None  # sliding windows and chunks
        and not kwargs.get("use_vmap", False)  # the model adds a pattern of its own
        and "allow_is_bidirectional_skip" not in kwargs
        and q_length is not None
        and q_length == kwargs.get("kv_length")
    )
    return None if plain else sdpa_mask(*args, **kwargs)


NAME = "tidegate"  # for models that are not patched: SDPA's own masks, which see positions restart
PATCHED = "tidegate_packed"  # for models whose forward looks after restarts


def register():
    """Makes the names known to Transformers; they act on models whose config selects them."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, mask in ((NAME, sdpa_mask), (PATCHED, attention_mask)):
        ALL_ATTENTION_FUNCTIONS.register(name, attention_forward)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)

"""Block-diagonal attention: equal to separate calls, no T x T memory, and SDPA's own behaviour without boundaries."""

import inspect
import time
import types

import pytest
import torch
import torch.nn.functional as F
from compare import assert_bits, leaves

from tidegate.errors import PackedInputError
from tidegate.packed.attention import attention_forward, attention_mask, packed_attention, packed_attention_bwd

LENGTHS = (5, 1, 64, 70, 129)
MODULE = types.SimpleNamespace(is_causal=True, num_key_value_groups=2, layer_idx=0)


def qkv(tokens, heads=4, kv_heads=2, width=16, dtype=torch.float32, batch=1):
    """As a model makes them: [B,T,H,D] seen as [B,H,T,D]."""
    return [torch.randn(batch, tokens, h, width, dtype=dtype).transpose(1, 2) for h in (heads, kv_heads, kv_heads)]


def spans(lengths=LENGTHS):
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for length, end in zip(lengths, ends, strict=True)]


def cu_of(lengths=LENGTHS):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("padded", [False, True])
def test_bits_of_separate_calls(dtype, padded):
    q, k, v = qkv(sum(LENGTHS), dtype=dtype)
    cu = cu_of((0, *LENGTHS)) if padded else cu_of()
    cu = torch.cat([cu, cu[-1:].expand(9)]) if padded else cu
    packed, separate = leaves(q, k, v), leaves(q, k, v)
    out, _ = attention_forward(MODULE, *packed, None, scaling=0.3, cu_seq_lens_q=cu)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    for span in spans():
        one = [x[:, :, span] for x in separate]
        want = F.scaled_dot_product_attention(*one, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
        assert_bits("out", out[:, span], want)
        (want * weight[:, span]).sum().backward()
    for name, got, want in zip("qkv", packed, separate, strict=True):
        assert torch.equal(got.grad, want.grad), f"d{name}"  # adding up the slices makes a zero of a minus zero


def test_autocast():
    q, k, v = qkv(12)
    cu = torch.tensor([0, 5, 12])
    with torch.autocast("cpu", torch.bfloat16):
        got = attention_forward(MODULE, q, k, v.bfloat16(), None, cu_seq_lens_q=cu)[0]
    want = attention_forward(MODULE, *(x.bfloat16() for x in (q, k, v)), None, cu_seq_lens_q=cu)[0]
    assert_bits("out", got, want)


def test_fp64_gradients():
    q, k, v = leaves(*qkv(7, width=8, dtype=torch.float64))
    cu = torch.tensor([0, 3, 7])
    torch.autograd.gradcheck(lambda q, k, v: packed_attention(q, k, v, cu, 0.4)[0], (q, k, v))


def test_operators():
    q, k, v = leaves(*qkv(12))
    cu = torch.tensor([0, 5, 12])
    torch.library.opcheck(packed_attention, (q, k, v, cu, 0.25))
    with torch.no_grad():
        out, lse = packed_attention(q, k, v, cu, 0.25)
        torch.library.opcheck(packed_attention_bwd, (torch.randn_like(out), q, k, v, out, lse, cu, 0.25))


def test_nothing_passes_between_sequences():
    """Not even NaN or Inf, in neither direction."""
    q, k, v = leaves(*qkv(12))
    cu = torch.tensor([0, 5, 12])
    want = packed_attention(q, k, v, cu, 0.25)[0]
    for x in (q, k, v):
        x.data[:, :, :5] = float("nan")
    got = packed_attention(q, k, v, cu, 0.25)[0]
    assert_bits("out", got[:, :, 5:], want[:, :, 5:])
    got[:, :, 5:].sum().backward()
    assert torch.isfinite(q.grad[:, :, 5:]).all() and torch.isfinite(k.grad[:, :, 5:]).all()


@pytest.mark.parametrize("cu", [[0, 5], [1, 12], [0, 8, 5, 12], [0, 13, 12], []])
def test_boundaries_are_checked(cu):
    with pytest.raises(PackedInputError, match=r"cu_seq_lens_q must rise from 0 to 12 \(tokens\), got"):
        packed_attention(*qkv(12), torch.tensor(cu, dtype=torch.int32), 0.25)


def test_what_packed_attention_does_not_do():
    q, k, v = qkv(12)
    call = dict(cu_seq_lens_q=torch.tensor([0, 5, 12]))
    for message, arguments, options in [
        ("takes no attention mask", (q, k, v, torch.ones(1, 1, 12, 12)), {}),
        ("has no dropout, got attention_dropout=0.1", (q, k, v, None), dict(dropout=0.1)),
        ("is causal", (q, k, v, None), dict(is_causal=False)),
        ("one row of tokens and no cache", (q[:, :, :4], k, v, None), {}),
        ("one row of tokens and no cache", (*qkv(12, batch=2), None), {}),
        ("values as wide as queries", (q, k, v[..., :8], None), {}),
    ]:
        with pytest.raises(PackedInputError, match=message):
            attention_forward(MODULE, *arguments, **call, **options)


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_without_boundaries_it_is_sdpa(mask):
    pytest.importorskip("transformers")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v = qkv(12, batch=2)
    if mask == "bool":
        mask = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12).clone()
        mask[0, :, 3:, :3] = False
    elif mask == "float":
        mask = torch.randn(2, 1, 12, 12)
    got = attention_forward(MODULE, q, k, v, mask, scaling=0.3, position_ids=None)
    assert_bits("out", got[0], sdpa_attention_forward(MODULE, q, k, v, mask, scaling=0.3)[0])


def mask_arguments(q_length, kv_length, **changes):
    """The call of Transformers' create_causal_mask, in the form of this release."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    arguments = dict(batch_size=2, kv_length=kv_length, kv_offset=0, mask_function=causal_mask_function)
    if "q_length" in inspect.signature(sdpa_mask).parameters:
        arguments |= dict(q_length=q_length, q_offset=kv_length - q_length)
    else:
        arguments |= dict(cache_position=torch.arange(kv_length - q_length, kv_length))
    return arguments | dict(attention_mask=None, allow_is_causal_skip=True, use_vmap=False) | changes


def test_mask_function():
    pytest.importorskip("transformers")
    from transformers.masking_utils import sdpa_mask

    def same(**arguments):
        got, want = attention_mask(**arguments), sdpa_mask(**arguments)
        return got is want if want is None else torch.equal(got, want)

    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[0, :3] = False
    assert attention_mask(**mask_arguments(12, 12, allow_is_causal_skip=False)) is None  # the stock one: T x T
    assert same(**mask_arguments(12, 12, attention_mask=padding))
    assert attention_mask(**mask_arguments(12, 12, attention_mask=padding)) is not None
    assert same(**mask_arguments(12, 12, attention_mask=torch.ones(2, 12, dtype=torch.bool)))
    assert same(**mask_arguments(3, 12))  # tokens after a cache
    assert attention_mask(**mask_arguments(3, 12)) is not None
    assert same(**mask_arguments(1, 12))
    assert same(**mask_arguments(12, 12, local_size=4))
    assert same(**mask_arguments(12, 12, allow_is_bidirectional_skip=True, allow_is_causal_skip=False))


def test_no_quadratic_memory():
    """A T x T bool mask of these 16384 tokens alone would have 268 MB."""
    from torch.profiler import ProfilerActivity, profile

    lengths = (256,) * 64
    q, k, v = leaves(*qkv(sum(lengths), heads=2, kv_heads=1, width=8))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        packed_attention(q, k, v, cu_of(lengths), 0.3)[0].sum().backward()
    largest = max(event.cpu_memory_usage for event in profiled.events())
    assert largest < 20 * q.numel() * 4, f"{largest} bytes"


def test_time_of_separate_calls():
    """32 x 1024 packed tokens take what 32 calls take."""
    lengths = (1024,) * 32
    q, k, v = qkv(sum(lengths), heads=2, kv_heads=1, width=32)
    cu, parts = cu_of(lengths), [[x[:, :, span] for x in (q, k, v)] for span in spans(lengths)]

    def best(run):
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return min(times)

    def separate():
        for part in parts:
            F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)

    for _ in range(5):  # the machine may be busy with something else
        ratio = best(lambda: packed_attention(q, k, v, cu, 32**-0.5)) / best(separate)
        if ratio <= 1.2:
            return
    raise AssertionError(f"{ratio:.2f} times the separate calls")

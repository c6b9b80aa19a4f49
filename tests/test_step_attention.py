"""Attention of a decode step: the values of SDPA with fewer roundings, masks, caches, and what is left to SDPA."""

import types

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close

from tidegate import _native
from tidegate.packed import attention, step

pytestmark = pytest.mark.skipif(bool(_native.fallback), reason="the products of a step are the native library's")
MODULE = types.SimpleNamespace(is_causal=True, num_key_value_groups=3, layer_idx=0)


def step_inputs(batch=2, heads=6, kv_heads=2, length=37, width=24, dtype=torch.float32):
    q = torch.randn(batch, 1, heads, width, dtype=dtype).transpose(1, 2)
    return q, *(torch.randn(batch, kv_heads, length, width, dtype=dtype) for _ in range(2))


def truth(q, k, v, mask=None, **options):
    mask = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    return F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), mask, enable_gqa=True, **options)


def run(q, k, v, mask=None, **options):
    assert step.serves(q, k, v, mask, 0.0)
    return attention.attention_forward(MODULE, q, k, v, mask, **options)[0].transpose(1, 2)


@pytest.mark.parametrize("length", [1, 2, 37, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (8, 1)])
def test_values(dtype, length, heads, kv_heads):
    q, k, v = step_inputs(heads=heads, kv_heads=kv_heads, length=length, dtype=dtype)
    want = truth(q, k, v, scale=0.3)
    assert_close("out", run(q, k, v, scaling=0.3), want, 1e-6)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("heads", [1, 6])
def test_masks(kind, heads):
    q, k, v = step_inputs()
    seen = torch.rand(2, heads, 1, 40) < 0.5  # Transformers may give more columns than there are keys
    seen[..., 0] = True
    mask = seen if kind == torch.bool else torch.where(seen, 0.0, -torch.inf) + 0.1 * torch.randn(seen.shape)
    assert_close("out", run(q, k, v, mask), truth(q, k, v, mask[..., :37]), 1e-6)


def test_row_that_sees_nothing():
    q, k, v = step_inputs()
    mask = torch.ones(2, 1, 1, 37, dtype=torch.bool)
    mask[1] = False
    out = run(q, k, v, mask)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert_close("out", out[0], truth(q, k, v)[0], 1e-6)


def test_nan_stays_in_its_row():
    q, k, v = step_inputs()
    k[1, 0, 3, 5] = torch.nan
    out = run(q, k, v)
    assert out[1, :3].isnan().all() and not out[1, 3:].isnan().any() and not out[0].isnan().any()


def test_caches_are_read_in_place():
    """A static cache: keys are the first of a longer memory, and the mask hides the rest."""
    q, k, v = step_inputs(length=64)
    mask = torch.arange(64).expand(2, 1, 1, 64) < 37
    assert_close("out", run(q, k, v, mask), truth(q, k[:, :, :37], v[:, :, :37]), 1e-6)
    short = k[:, :, :37], v[:, :, :37]
    assert_close("out", run(q, *short), truth(q, *short), 1e-6)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in short]
    assert not step.serves(q, *turned, None, 0.0)  # their heads are no list of matrices: SDPA's
    got = attention.attention_forward(MODULE, q, *turned, None)[0].transpose(1, 2)
    assert_close("out", got, truth(q, *turned), 1e-5)


def test_what_is_left_to_sdpa():
    q, k, v = step_inputs()
    two = torch.cat([q, q], 2)
    assert step.serves(q, k, v, None, 0.0)
    for call in [
        (two, k, v, None, 0.0),
        (q, k, v, None, 0.1),
        (q.double(), k.double(), v.double(), None, 0.0),
        (q, k.bfloat16(), v.bfloat16(), None, 0.0),
        (q.clone().requires_grad_(), k, v, None, 0.0),
        (q, k[:, :, :0], v[:, :, :0], None, 0.0),
        (q, k, v, torch.zeros(2, 37), 0.0),
    ]:
        assert not step.serves(*call)
    with torch.autocast("cpu", torch.bfloat16):
        assert not step.serves(q, k, v, None, 0.0)
    with torch.no_grad():
        assert step.serves(q.clone().requires_grad_(), k, v, None, 0.0)


def test_sdpa_is_not_called(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: pytest.fail("SDPA was called"))
    run(*step_inputs())


def test_options_of_sdpa_are_sdpas(monkeypatch):
    """Those that Transformers' function acts on."""
    q, k, v = step_inputs()
    taken = []
    monkeypatch.setattr(step, "step_attention", lambda *args: taken.append(1))
    if "position_bias" in attention._options_of_sdpa():
        bias = 3 * torch.randn(1, 6, 1, 37)
        got = attention.attention_forward(MODULE, q, k, v, None, position_bias=bias)[0].transpose(1, 2)
        assert_close("out", got, truth(q, k, v, bias), 1e-5)
    for options in ({"softcap": 1.0}, {"output_attentions": True}):
        try:
            attention.attention_forward(MODULE, q, k, v, None, **options)
        except ValueError as error:  # in releases that refuse it
            assert "softcap" in str(error)
    assert not taken
    attention.attention_forward(MODULE, q, k, v, None, softcap=None, output_attentions=False, use_cache=True)
    assert taken


def test_default_device_and_mapped_masks():
    q, k, v = step_inputs()
    with torch.device("meta"):
        got = attention.attention_forward(MODULE, q, k, v, None)[0]
    assert_close("out", got.transpose(1, 2), truth(q, k, v), 1e-5)
    masks = torch.rand(3, 2, 1, 1, 37) < 0.7
    got = torch.func.vmap(lambda mask: attention.attention_forward(MODULE, q, k, v, mask)[0])(masks)
    for one, mask in zip(got, masks, strict=True):
        assert_close("out", one.transpose(1, 2), truth(q, k, v, mask), 1e-5)

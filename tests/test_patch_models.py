"""Patched models compute what they computed before: logits, gradients, generation, padding, caches."""

import copy
import functools

import pytest
import torch

pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402

import tidegate  # noqa: E402
from tidegate.patch.selftest import stock_forward  # noqa: E402

T32 = 1e-5


def on_torch(model):
    """A model, not patched, whose layers call torch's functions, whatever packages are installed."""
    for layer in tiny.linear_layers(model):
        layer.forward = stock_forward(layer).__get__(layer)
    return model


def stock(family, **options):
    return on_torch(tiny.build(family, **options))


def pair(family, patch_options=None, **options):
    """The same model stock and patched."""
    patched = tiny.build(family, **options)
    tidegate.patch(patched, options=patch_options)
    return stock(family, **options), patched


@functools.cache
def shared(family):
    """A pair for tests that leave it as it is."""
    return pair(family)


def exact(family):
    """The patched model in fp64, where our operators run their definitions: the truth for gradients."""
    model = tiny.build(family).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    tidegate.patch(model)
    return model


def close(got, expected, truth):
    """Within T32 of the stock model, or of the truth where the stock model itself is further away."""
    if tiny.relative(got, expected) <= T32:
        return True
    limit = max(T32, tiny.relative(expected.double(), truth))
    return tiny.relative(got.double(), truth) <= limit


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "original"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_loss_and_gradients(family, fused):
    expected, patched = pair(family, {"gdn_layer": fused})
    layers = tiny.linear_layers(patched)
    rows = tidegate.report(patched).only(op="gdn_layer", status="installed")
    assert len(rows) == len(layers) == 3
    assert {row.mechanism[0] for row in rows} <= ({"I"} if fused else {"R", "J"})
    ids = tiny.tokens(2, 70)
    assert tiny.relative(tiny.logits(patched, ids), tiny.logits(expected, ids)) < T32
    loss, wanted = tiny.gradients(expected, ids)
    got_loss, got = tiny.gradients(patched, ids)
    truth_loss, truth = tiny.gradients(exact(family), ids)
    assert abs(loss - got_loss) <= T32 * loss and got.keys() == wanted.keys()
    wrong = [name for name in wanted if not close(got[name], wanted[name], truth[name])]
    assert not wrong, [(n, tiny.relative(got[n].double(), truth[n])) for n in wrong]


def test_every_layer_is_really_called(monkeypatch):
    from tidegate.patch import gdn_forward

    calls = []
    original = gdn_forward.prefill
    monkeypatch.setattr(gdn_forward, "prefill", lambda *args: calls.append(args[0].layer_idx) or original(*args))
    _, patched = pair("qwen3_5")
    calls.clear()  # of the self-test
    tiny.logits(patched, tiny.tokens())
    assert calls == [0, 1, 2]


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid"])
def test_bf16_is_as_close_to_the_truth_as_the_stock_model(family):
    expected, patched = pair(family, dtype=torch.bfloat16)
    ids = tiny.tokens(2, 70)
    reference = stock(family, dtype=torch.bfloat16).float()
    truth = tiny.logits(reference, ids)
    errors = [(tiny.logits(model, ids).float() - truth) for model in (patched, expected)]
    assert errors[0].abs().max() <= 2 * errors[1].abs().max()
    assert errors[0].square().mean() <= 4 * errors[1].square().mean()  # of squares


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_generation(family, batch):
    expected, patched = shared(family)
    ids = tiny.tokens(batch, 11)
    options = dict(max_new_tokens=64 if batch == 1 else 16, do_sample=False)
    assert torch.equal(patched.generate(ids, **options), expected.generate(ids, **options))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
@pytest.mark.parametrize("split", [1, 2, 20, 49])
def test_chunked_prefill(family, split):
    """Two parts through a cache are the whole. Old releases ignore the first part; ours do not."""
    _, patched = shared(family)
    ids = tiny.tokens(2, 51)
    whole = tiny.logits(patched, ids)
    with torch.no_grad():
        first = patched(ids[:, :split], use_cache=True)
        second = patched(ids[:, split:], past_key_values=first.past_key_values, use_cache=True)
    assert tiny.relative(torch.cat((first.logits, second.logits), 1), whole) < T32


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
def test_decode_continues_the_prompt(family):
    _, patched = shared(family)
    ids = tiny.tokens(3, 24)
    whole, cache, steps = tiny.logits(patched, ids), None, []
    with torch.no_grad():
        for part in (ids[:, :14], *ids[:, 14:].split(1, 1)):
            out = patched(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    assert tiny.relative(torch.cat(steps, 1), whole) < T32


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_left_padding(family):
    expected, patched = shared(family)
    ids = tiny.tokens(4, 40)
    mask = torch.ones_like(ids)
    mask[0, :5], mask[2, :33] = 0, 0
    got, wanted = (tiny.logits(m, ids, attention_mask=mask)[mask > 0] for m in (patched, expected))
    assert tiny.relative(got, wanted) < T32
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(patched.generate(ids, **options), expected.generate(ids, **options))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("real", [2, 9, 17])
def test_right_padding_with_a_cache(family, real):
    """A prompt that ends in padding continues like the prompt without it."""
    _, patched = shared(family)
    ids = tiny.tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, real:] = 0
    more = tiny.tokens(2, 3, seed=5)
    with torch.no_grad():
        alone = patched(torch.cat((ids[:1, :real], more[:1]), 1)).logits[:, real:]
        cache = patched(ids, attention_mask=mask, use_cache=True).past_key_values
        longer = torch.cat((mask, torch.ones_like(more)), 1)
        positions = mask.sum(1, keepdim=True) + torch.arange(3)
        out = patched(more, attention_mask=longer, position_ids=positions, past_key_values=cache, use_cache=True)
    assert tiny.relative(out.logits[:1], alone) < T32


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid"])
def test_beam_search(family):
    expected, patched = shared(family)
    options = dict(max_new_tokens=12, num_beams=3, do_sample=False)
    ids = tiny.tokens(2, 9)
    assert torch.equal(patched.generate(ids, **options), expected.generate(ids, **options))


def outcome(call):
    """What a call gives, or the text of its error: not every release can generate in every way."""
    try:
        return call()
    except (ValueError, NotImplementedError, AttributeError, KeyError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("way", ["assistant", "prompt lookup", "static cache", "sampling", "group of beams"])
def test_other_ways_to_generate(way):
    """As the stock model does, token by token; or the stock model's error."""
    models, ids = pair("qwen3_5", layers=2), tiny.tokens(1, 11).repeat(1, 2)
    helpers = pair("qwen3_5", layers=2, seed=4)
    results = []
    for model, helper in zip(models, helpers, strict=True):
        options = {
            "assistant": dict(assistant_model=helper),
            "prompt lookup": dict(prompt_lookup_num_tokens=3),
            "static cache": dict(cache_implementation="static"),
            "sampling": dict(do_sample=True, top_k=5, num_return_sequences=3),
            "group of beams": dict(num_beams=4, num_return_sequences=2, length_penalty=0.5),
        }[way]
        torch.manual_seed(0)
        results.append(outcome(lambda: model.generate(ids, **{"do_sample": False, **options}, max_new_tokens=20)))  # noqa: B023
    expected, got = results
    assert type(got) is type(expected), results
    assert got == expected if isinstance(got, str) else torch.equal(got, expected)
    if isinstance(got, str):
        pytest.skip(f"this release cannot do it: {got}")


def test_a_layer_that_records_its_past():
    """Assisted decoding keeps the columns of the convolution: one token must not take the short way then."""
    from transformers import cache_utils

    if not hasattr(getattr(cache_utils, "LinearAttentionCacheLayerMixin", None), "activate_past_recording"):
        pytest.skip("this Transformers records no past")
    expected, patched = pair("qwen3_5")
    if "record_past" not in str(stock_forward(tiny.linear_layers(expected)[0]).__code__.co_names) and not hasattr(
        cache_utils.Cache, "is_recording_past"
    ):
        pytest.skip("this Transformers' layers ignore the recording")
    ids, states = tiny.tokens(1, 12), []
    for model in (expected, patched):
        cache = cache_utils.DynamicCache(config=model.config)
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        with torch.no_grad():
            for part in (ids[:, :7], ids[:, 7:8], ids[:, 8:]):
                logits = model(part, past_key_values=cache, use_cache=True).logits
        states.append((logits, cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]))
    for got, wanted in zip(*reversed(states), strict=True):
        assert got.shape == wanted.shape and tiny.relative(got, wanted) < T32


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "original"])
def test_a_packed_layer_keeps_its_sequences_apart(fused):
    """The layer alone, with the boundaries in its keywords; the whole model is the packed layer's business."""
    _, patched = pair("qwen3_5", {"gdn_layer": fused})
    layer = tiny.linear_layers(patched)[0]
    x = torch.randn(1, 64, 32)
    separate = torch.cat([layer(part) for part in x.split((24, 40), 1)], 1)
    cu = torch.tensor([0, 24, 64], dtype=torch.int32)
    padded = torch.cat((cu, torch.full((62,), 64, dtype=torch.int32)))
    seq_idx = (torch.arange(64) >= 24).int()[None]
    site = layer._tidegate.sites["gdn_layer"]
    if not site.packs:
        with pytest.raises(tidegate.errors.PackedInputError):
            layer(x, cu_seq_lens_q=cu)
        return
    for kwargs in (dict(cu_seq_lens_q=cu), dict(cu_seq_lens_q=padded), dict(seq_idx=seq_idx)):
        assert torch.equal(layer(x, **kwargs), separate)


def test_deep_copies_of_models_and_their_undo():
    expected, patched = pair("qwen3_5")
    twin, ids = copy.deepcopy(patched), tiny.tokens()
    assert torch.equal(tiny.logits(twin, ids), tiny.logits(patched, ids))
    assert tidegate.unpatch(twin) and not tidegate.report(twin)
    assert torch.equal(tiny.logits(on_torch(twin), ids), tiny.logits(expected, ids)) and tidegate.report(patched)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_holes_in_a_mask(family):
    """Masked tokens between real ones are what they are in the original, also where a cache is filled."""
    expected, patched = shared(family)
    ids = tiny.tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, 10:20] = 0
    mask[1, 30:] = 0
    real = mask.bool()
    for cache in (False, True):
        got, want = (tiny.logits(m, ids, attention_mask=mask, use_cache=cache)[real] for m in (patched, expected))
        assert tiny.relative(got, want) < T32, cache


@pytest.mark.parametrize("first", ["hook", "patch"])
def test_hooks_of_the_gated_norm(first):
    """They run, though the layer otherwise only reads the norm's weight; for prefill and for a step."""
    expected, model = stock("qwen3_5"), tiny.build("qwen3_5")
    ids = tiny.tokens(2, 12)
    install = [lambda: tidegate.patch(model), lambda: hook(model)]

    def hook(of):
        norm = tiny.linear_layers(of)[0].norm
        norm.register_forward_hook(lambda module, args, out: out * 0.5)

    for act in install if first == "patch" else reversed(install):
        act()
    plain = tiny.logits(expected, ids)
    hook(expected)
    want = tiny.logits(expected, ids)
    assert tiny.relative(plain, want) > 1e-2
    assert tiny.relative(tiny.logits(model, ids), want) < 1e-5
    options = dict(max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True)
    got, want = (torch.stack(m.generate(ids, **options).logits) for m in (model, expected))
    assert tiny.relative(got, want) < T32

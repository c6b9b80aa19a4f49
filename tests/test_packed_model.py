"""Whole models: packed input gives what separate runs give, or an error; never anything else."""

import functools
import itertools

import pytest
import tiny_models
import torch
from packed_case import (
    METADATA,
    SPLITS,
    assert_equal_runs,
    batch_of,
    exact,
    packable,
    packs,
    patched,
    samples,
    separate,
    should_pack,
    spans,
    together,
)

import tidegate
from tidegate.errors import PackedInputError

pytest.importorskip("transformers")


@pytest.mark.parametrize("lengths", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"])
def test_packed_is_separate(family, lengths):
    """Logits, loss and all gradients."""
    model = packable(family)
    ids, batch = batch_of(lengths)
    truth = functools.partial(exact, family, lengths)
    assert_equal_runs(together(model, ids, **batch), separate(model, lengths), truth=truth)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_family_that_cannot_be_packed_says_so(family):
    model, _ = patched(family)
    assert packs(model) == should_pack(family)
    if packs(model):
        return
    ids, batch = batch_of((24, 40))
    with pytest.raises(
        PackedInputError, match="this model cannot run packed input: .*(ple|hyper|conv|indexer|self_attn)"
    ):
        model(ids, **batch)
    with pytest.raises(PackedInputError, match="padding_free is not set"):
        model(ids, position_ids=batch["position_ids"])
    model(ids)


@pytest.fixture(scope="module")
def model():
    return patched("qwen3_5")[0]


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seq_lens"])
def test_names_of_other_functions_are_not_dropped(model, name):
    ids, _ = batch_of((24, 40))
    with pytest.raises(PackedInputError, match=f"{name}: a model takes boundaries as cu_seq_lens_q"):
        model(ids, **{name: torch.tensor([0, 24, 64])})


def test_sources_give_the_same_bits(model):
    """Each source alone and all combinations."""
    ids, batch = batch_of((24, 0, 40))
    text = batch["position_ids"]
    positions = [None, text[0], text, text.expand(3, 1, -1), text.expand(4, 1, -1)]
    want = tiny_models.logits(model, ids, **batch)
    for count in range(len(METADATA) + 1):
        for names in itertools.combinations(METADATA, count):
            for rows in positions:
                given = {name: batch[name] for name in names} | ({} if rows is None else {"position_ids": rows})
                if given:
                    assert torch.equal(tiny_models.logits(model, ids, padding_free=True, **given), want), given.keys()


@functools.cache
def leaking(layer_types):
    """A patched model of a kind that leaks in Transformers, and whether its release has a cache for it."""
    cache = True
    if layer_types is None:
        model = tiny_models.build("qwen3_5")
    else:
        model = tiny_models.build("qwen3_5", layer_types=list(layer_types))
        try:
            model(tiny_models.tokens(1, 3), use_cache=True)
        except ValueError:
            cache = False
    tidegate.patch(model)
    return model, cache


@pytest.mark.parametrize("layer_types", [None, ("full_attention",) * 4], ids=["hybrid", "full attention"])
@pytest.mark.parametrize("mask", [False, True], ids=["no mask", "ones"])
@pytest.mark.parametrize("use_cache", [None, False, True])
def test_never_a_leak(layer_types, mask, use_cache):
    """Every way of calling that leaks in Transformers is right here, or an error."""
    model, cache = leaking(layer_types)
    if use_cache is not False and not cache:
        pytest.skip("this release's cache needs a linear-attention layer")
    ids, batch = batch_of((24, 40))
    text = batch["position_ids"]
    want = torch.cat([tiny_models.logits(model, row[None], use_cache=False)[0] for row in samples((24, 40))])
    call = {"attention_mask": torch.ones_like(ids)} if mask else {}
    call |= {} if use_cache is None else {"use_cache": use_cache}
    forms = [{name: batch[name]} for name in METADATA]
    forms += [{"position_ids": p} for p in (text[0], text, text.expand(3, 1, -1), text.expand(4, 1, -1))]
    for form, padding_free in itertools.product(forms, (None, True)):
        explicit = {} if padding_free is None else {"padding_free": padding_free}
        if use_cache or (padding_free is None and "position_ids" in form):
            with pytest.raises(PackedInputError, match="cannot fill a cache|padding_free is not set"):
                model(ids, **form, **call, **explicit)
        else:
            got = tiny_models.logits(model, ids, **form, **call, **explicit)[0]
            assert tiny_models.relative(got, want) <= 1e-5, form


@torch.no_grad()
def test_padded_prompts_with_a_static_cache(model):
    """generate() makes masks of four dimensions for it; positions of padding in them are no restarts."""
    ids = tiny_models.tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False)
    want = model.generate(ids, **options)
    static = dict(cache_implementation="static", disable_compile=True)
    try:
        tiny_models.build("qwen3_5").generate(ids, **options, **static)
    except KeyError as error:  # 5.9 has no mask for linear layers beside this cache
        with pytest.raises(KeyError, match=f"^{error}$"):
            model.generate(ids, **options, **static)
        return
    assert torch.equal(model.generate(ids, **options, **static), want)


def four_dimensions(kind, sees):
    """A mask [1,1,T,T] in one of the forms that models take."""
    if kind == "bool":
        return sees[None, None]
    float_mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[None, None]
    return float_mask if kind == "float" else {"full_attention": float_mask, "linear_attention": None}


@pytest.mark.parametrize("kind", ["bool", "float", "dict"])
def test_masks_that_hide_samples_from_each_other(model, kind):
    """Linear attention has no mask of four dimensions: what hides one sample from another is refused, the rest runs."""
    ids = tiny_models.tokens(1, 20)
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    want = tiny_models.logits(model, ids, use_cache=False)
    mask = four_dimensions(kind, causal)
    try:
        tiny_models.logits(tiny_models.build("qwen3_5"), ids, attention_mask=mask, use_cache=False)
    except AttributeError as error:  # the oldest releases know no dict of masks
        pytest.skip(f"the model itself takes no {kind} mask: {error}")
    torch.testing.assert_close(tiny_models.logits(model, ids, attention_mask=mask, use_cache=False), want)
    blocks = causal.clone()
    blocks[10:, :10] = False
    for given in (dict(use_cache=False), dict()):
        with pytest.raises(PackedInputError, match=r"attention_mask\[0\]: token 11 does not see token 0, which tokens"):
            model(ids, attention_mask=four_dimensions(kind, blocks), **given)
    model(ids, attention_mask=four_dimensions(kind, blocks), use_cache=False, padding_free=False)
    padded = causal.clone()  # tokens 0 to 4 are padding that sees itself alone
    padded[:, :5] = torch.eye(20, dtype=torch.bool)[:, :5]
    model(ids, attention_mask=four_dimensions(kind, padded), use_cache=False)


@pytest.mark.parametrize("name", ["cu_seqlens_k", "segment_ids", "seq_ids"])
def test_names_that_a_model_would_drop(model, name):
    ids, batch = batch_of((24, 40))
    with pytest.raises(PackedInputError, match=f"{name}: a model takes boundaries as cu_seq_lens_q"):
        model(ids, use_cache=False, **{name: batch["cu_seq_lens_q"]})


def test_boundaries_of_another_device(model):
    ids, batch = batch_of((24, 40))
    with pytest.raises(PackedInputError, match="cu_seq_lens_q: expected a tensor on cpu, got one on meta"):
        model(ids, use_cache=False, cu_seq_lens_q=batch["cu_seq_lens_q"].to("meta"))


def test_false_is_one_sequence(model):
    ids, batch = batch_of((24, 40))
    got = tiny_models.logits(model, ids, position_ids=batch["position_ids"], padding_free=False, use_cache=False)
    assert torch.equal(got[0, :24], tiny_models.logits(model, ids, use_cache=False)[0, :24])
    with pytest.raises(PackedInputError, match="cu_seq_lens_q is given but padding_free is False"):
        model(ids, padding_free=False, **batch)


def test_the_option_of_the_patch():
    ids, batch = batch_of((24, 40))
    model, handle = patched("qwen3_5", padding_free=True)
    want = tiny_models.logits(model, ids, **batch)
    assert torch.equal(tiny_models.logits(model, ids, position_ids=batch["position_ids"]), want)
    with pytest.raises(PackedInputError, match="nothing says where sequences begin"):
        model(ids)
    assert "padding_free=on" in str(handle.report())
    model, _ = patched("qwen3_5", padding_free=False)
    with pytest.raises(PackedInputError, match="padding_free is False"):
        model(ids, **batch)


def test_embeddings_instead_of_ids(model):
    ids, batch = batch_of((24, 40))
    embeddings = model.get_input_embeddings()(ids)
    got = model(inputs_embeds=embeddings, **batch).logits
    assert torch.equal(got, model(ids, **batch).logits)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_no_bit_passes_between_samples(family):
    """All pairs of five samples: logits and gradients of the embeddings."""
    lengths = (5, 1, 64, 3, 70)
    model = packable(family)
    ids, batch = batch_of(lengths)
    weights = torch.randn(sum(lengths), tiny_models.VOCABULARY)

    def run(ids):
        embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=embeddings, **batch).logits[0]
        return logits.detach(), torch.autograd.grad((logits * weights).sum(), embeddings)[0][0]

    before = run(ids)
    for changed in spans(lengths):
        other = ids.clone()
        other[:, changed] = (other[:, changed] + 7) % tiny_models.VOCABULARY
        for name, got, want in zip(("logits", "gradient"), run(other), before, strict=True):
            kept = torch.ones(sum(lengths), dtype=torch.bool)
            kept[changed] = False
            assert torch.equal(got[kept], want[kept]), name


def test_packing_needs_all_parts():
    ids, batch = batch_of((24, 40))
    model, _ = patched("qwen3_5", options=tidegate.PatchOptions(attention=False))
    with pytest.raises(PackedInputError, match="full attention runs 'sdpa'.*patch with the op attention"):
        model(ids, **batch)
    model, _ = patched("qwen3_5", ops="attention")
    with pytest.raises(PackedInputError, match="layers.0.linear_attn is not patched"):
        model(ids, **batch)
    model, _ = patched("qwen3_5")
    layer = tiny_models.linear_layers(model)[1]
    layer.forward = type(layer).forward.__get__(layer)  # as kernelize does
    with pytest.raises(PackedInputError, match="layers.1.linear_attn is not patched"):
        model(ids, **batch)


@pytest.mark.parametrize("off", ["gdn_layer", "gdn_conv"])
def test_with_the_layers_own_code(off):
    """Either equal to separate runs or refused: it depends on the release what boundaries the code takes."""
    model, _ = patched("qwen3_5", options=tidegate.PatchOptions(**{off: False}))
    ids, batch = batch_of((24, 40))
    try:
        got = together(model, ids, **batch)
    except PackedInputError as error:
        assert "cannot run packed input" in str(error)
        return
    assert off != "gdn_conv"
    assert_equal_runs(got, separate(model, (24, 40)))

"""Sequence-parallel models on 2, 3 and 4 processes against one process: logits, loss, every gradient."""

import copy
import functools
import importlib.util

import pytest
import ranks as harness
import torch

pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from sequence_case import (  # noqa: E402
    LIMIT,
    Cases,
    alone,
    assert_same,
    batch,
    build,
    distance,
    gradients,
    needs_support,
    one_process,
    refused,
    together,
)

from tidegate.parallel import gather_loss_tensors, sequence_parallel  # noqa: E402

pytestmark = [needs_support, pytest.mark.slow]


def equal_runs(family, heads, kind, size, mode, attention, ranks):
    model = build(family, heads)
    if not hasattr(model.model.layers[0].linear_attn, "conv1d"):  # OLMo Hybrid before Transformers 5.15
        return refused(
            lambda: sequence_parallel(model, ranks.groups[size], mode), "in modules of their own", ranks.groups[size]
        )
    with sequence_parallel(model, ranks.groups[size], mode, attention=attention, grad_reduction="sum") as handle:
        got = together(handle, model, batch(kind))
    if ranks.rank == 0:  # the others need not know
        # One process of OLMo Hybrid is 5e-6 from fp64. Qwen3.5-MoE is within 1e-6 on AVX-512, and at 1.3e-6 on AVX2.
        strict = family not in ("olmo_hybrid", "qwen3_5_moe")
        assert_same(got, alone(family, heads, kind), lambda: alone(family, heads, kind, torch.float64), strict)


def exact_runs(size, mode, attention, ranks):
    """The same in fp64, where nothing but a mistake is visible. The loss itself is fp32 in Transformers."""
    model, kind = build("qwen3_5", dtype=torch.float64), (30, 1, 70)
    with sequence_parallel(model, ranks.groups[size], mode, attention=attention, grad_reduction="sum") as handle:
        cuts = tuple(sum(kind) * r // size for r in range(size + 1))  # anywhere, not on the grid
        got = together(handle, model, handle.shard(batch(kind), cuts))
    if ranks.rank == 0:
        want = alone("qwen3_5", "two", kind, torch.float64)
        assert distance(got[0], want[0]) <= 1e-12
        assert got[2].keys() == want[2].keys()
        assert all(distance(got[2][name], want[2][name]) <= 1e-12 for name in want[2])


def length_that_does_not_divide(ranks):
    model, group = build("qwen3_5"), ranks.groups[2]
    want = alone("qwen3_5", "two", 41)
    for mask in (None, torch.ones(1, 41, dtype=torch.int64)):
        with sequence_parallel(model, group, "chain", grad_reduction="sum") as handle:
            got = together(handle, model, dict(batch(41), attention_mask=mask))
            assert_same(got, want, lambda: alone("qwen3_5", "two", 41, torch.float64))
            with torch.no_grad():
                logits = model(**batch(41)).logits
            wide = torch.nn.functional.pad(logits, (0, 0, 0, 3))  # as a trainer pads shards
            labels = handle.shard(batch(41))["labels"]
            assert [len(x[0]) for x in gather_loss_tensors(wide, labels, plan=handle.plan)] == [41, 41]


def padded_batches(ranks):
    """In fp64, where nothing but a mistake is visible: in fp32 one process with padding has other chunks than ranks
    without it. The loss itself is fp32 in Transformers."""
    model, ids = build("qwen3_5", dtype=torch.float64), tiny.tokens(3, 24)
    mask = torch.ones_like(ids)
    mask[0, :7], mask[2, 15:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 7] = -100
    given = dict(input_ids=ids, labels=labels, attention_mask=mask)

    want = one_process(model, given, mask.bool())
    for mode in ("chain", "scan"):
        with sequence_parallel(model, ranks.groups[3], mode, grad_reduction="sum") as handle:
            logits, loss, found = together(handle, model, given)
            logits = handle.restore(logits)[mask.bool()]
        assert distance(logits, want[0]) <= 1e-12 and abs(float(loss - want[1])) <= LIMIT * float(want[1])
        assert found.keys() == want[2].keys()
        assert all(distance(found[name], want[2][name]) <= 1e-12 for name in found)


def partly_frozen(ranks):
    """Only some parameters train, the input needs a gradient on one rank only, and one rank has no tokens."""
    model, rank, group = copy.deepcopy(build("qwen3_5")), ranks.rank, ranks.groups[3]
    for name, p in model.named_parameters():
        p.requires_grad_("layers.1." in name)
    given = batch((30, 11))
    ids = given.pop("input_ids")
    want, exact = (alone("qwen3_5", "two", (30, 11), t) for t in (torch.float32, torch.float64))
    trained = {name: g for name, g in want[2].items() if "layers.1." in name}
    with sequence_parallel(model, group, "chain", grad_reduction="sum") as handle:
        embeds = model.model.embed_tokens(ids).detach().requires_grad_(rank == 1)
        local = handle.shard(dict(given, inputs_embeds=embeds), starts=(0, 20, 20, 41))
        got = together(handle, model, local)
    assert_same(got, (*want[:2], trained, want[3]), lambda: exact, strict=False)


def adapters_only(ranks):
    """LoRA alone trains, in fp64, and one rank has no tokens: its backward takes part all the same."""
    import peft

    torch.manual_seed(1)
    targets = ["in_proj_qkv", "out_proj", "q_proj", "down_proj"]
    settings = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(build("qwen3_5", dtype=torch.float64)), settings)
    given = batch((30, 11))
    model(**given, use_cache=False).loss.backward()
    want = gradients(model)
    with sequence_parallel(model, ranks.groups[3], "chain", grad_reduction="sum") as handle:
        got = together(handle, model, handle.shard(given, starts=(0, 20, 20, 41)))[2]
    assert got.keys() == want.keys() and all("lora_" in name for name in got)
    assert all(distance(got[name], want[name]) <= 1e-12 for name in want)


def empty_shard(ranks):
    """A rank without a token, in every mode; and cuts inside of the convolution's window."""
    model = build("qwen3_5_moe")
    for mode in ("chain", "scan"):
        for starts in ((0, 20, 20, 41), (0, 0, 40, 41), (0, 39, 40, 41)):
            with sequence_parallel(model, ranks.groups[3], mode, grad_reduction="sum") as handle:
                got = together(handle, model, handle.shard(batch((30, 11)), starts))
            if ranks.rank == 0:
                want, exact = (alone("qwen3_5_moe", "two", (30, 11), t) for t in (torch.float32, torch.float64))
                assert_same(got, want, lambda exact=exact: exact, strict=False)


def router_loss(ranks):
    model = build("qwen3_5_moe")
    given = dict(batch((30, 11)), output_router_logits=True)

    want = one_process(model, given)
    with torch.no_grad():
        want_aux = model(**given, use_cache=False).aux_loss
    with sequence_parallel(model, ranks.groups[3], "scan", grad_reduction="sum") as handle:
        got = together(handle, model, given)
        with torch.no_grad():
            aux = model(**given).aux_loss
        shard = torch.nn.functional.softmax(model(**batch((30, 11))).logits, -1)
        entropy = handle.gather(-(shard * shard.log()).sum(-1)).detach()
    assert abs(float(aux - want_aux)) <= LIMIT * float(want_aux)
    assert_same(got, want, lambda: one_process(build("qwen3_5_moe", dtype=torch.float64), given))
    whole = torch.nn.functional.softmax(want[0], -1)
    assert distance(entropy, -(whole * whole.log()).sum(-1)) <= LIMIT


def checkpointing(ranks):
    model = copy.deepcopy(build("qwen3_5"))
    found = []
    with sequence_parallel(model, ranks.groups[3], "chain", grad_reduction="sum") as handle:
        for on in (False, True):
            if on:
                model.gradient_checkpointing_enable(dict(use_reentrant=False))
            model.train()
            found.append(together(handle, model, batch((30, 11)))[2])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def text_model_alone(ranks):
    """Without a head there is no loss; the hidden states are a shard."""
    model = build("qwen3_5").model
    with torch.no_grad():
        want = model(**{k: v for k, v in batch((30, 11)).items() if k != "labels"}).last_hidden_state
        with sequence_parallel(model, ranks.groups[2], "scan") as handle:
            given = {k: v for k, v in batch((30, 11)).items() if k != "labels"}
            got = handle.gather(model(**given).last_hidden_state)
    assert distance(got, want) <= LIMIT


WORLD = 4
KINDS = (40, 41, 1000, (3, 30, 1, 500, 66, 400))


def cases():
    found = Cases()

    def runs(size, kind, family="qwen3_5", heads="two", mode="chain", attention="auto"):
        name = f"{family}-{heads}-{mode}-{attention}-{size}-{kind if isinstance(kind, int) else 'pack'}"
        found.add(name, size, functools.partial(equal_runs, family, heads, kind, size, mode, attention))

    for size in (2, 3, 4):
        for kind in KINDS:
            for mode in ("chain", "scan"):
                runs(size, kind, mode=mode)
    for kind in KINDS:
        runs(2, kind, mode="heads")
    runs(2, KINDS[-1], heads="three", mode="heads")
    runs(3, KINDS[-1], heads="three", mode="heads")
    runs(4, KINDS[-1], heads="three", mode="chain")
    runs(4, 41, heads="three", mode="scan")
    runs(2, KINDS[-1], attention="ring")
    for family in ("qwen3_5_moe", "qwen3_next", "olmo_hybrid"):
        runs(3, KINDS[-1], family)
        runs(2, 41, family, mode="heads")
    for size, mode, attention in ((2, "heads", "heads"), (3, "chain", "ring"), (4, "scan", "ring")):
        found.add(f"exact-{mode}", size, functools.partial(exact_runs, size, mode, attention))
    found.add("empty-shard", 3, empty_shard)
    found.add("length-that-does-not-divide", 2, length_that_does_not_divide)
    found.add("padded-batches", 3, padded_batches)
    found.add("partly-frozen", 3, partly_frozen)
    if importlib.util.find_spec("peft") is not None:
        found.add("adapters-only", 3, adapters_only)
    found.add("router-loss", 3, router_loss)
    found.add("checkpointing", 3, checkpointing)
    found.add("text-model-alone", 2, text_model_alone)
    return found


NAMES = list(cases())


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return harness.run(cases, NAMES, WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_ranks(failures, name):
    assert not failures[name], "\n".join(failures[name])

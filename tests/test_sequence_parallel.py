"""Sequence-parallel models on 2, 3 and 4 processes against one process: logits, loss, every gradient; and bad steps."""

import copy
import functools
import time

import pytest
import ranks as harness
import torch

pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402

import tidegate  # noqa: E402
from tidegate.errors import SequenceParallelError  # noqa: E402
from tidegate.parallel import gather_loss_tensors, sequence_parallel  # noqa: E402

WORLD = 4
LIMIT = 1e-6
GATE_LIMIT = 1e-5  # of A_log and dt_bias in fp32: the largest seen is 6e-6, on 1000 tokens
HEADS = {"two": {}, "three": dict(linear_num_key_heads=3, linear_num_value_heads=9, num_attention_heads=3)}
HEADS["three"]["num_key_value_heads"] = 3  # 2 and 4 do not divide it


def batch(kind):
    """A length, or the lengths of a pack."""
    if isinstance(kind, int):
        ids = tiny.tokens(1, kind)
        return dict(input_ids=ids, labels=ids)
    ids = tiny.tokens(1, sum(kind))[0]
    return tidegate.pack(list(ids.split(kind)))


@functools.cache
def build(family, heads="two", dtype=torch.float32):
    model = tiny.build(family, **HEADS[heads]).to(dtype)
    options = {}
    if dtype == torch.float64 and family != "qwen3_5":  # Transformers' own experts and router in fp64
        model.set_experts_implementation("eager")
        options = dict(router=False)
    tidegate.patch(model, options=options)
    return model


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@functools.cache
def alone(family, heads, kind, dtype=torch.float32):
    """Logits, loss and gradients of one process."""
    model = build(family, heads, dtype)
    model.zero_grad()
    out = model(**batch(kind), use_cache=False)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach(), gradients(model)


def together(handle, model, arguments):
    model.zero_grad()
    out = model(**arguments)
    out.loss.backward()
    handle.reduce_gradients()
    return handle.gather(out.logits.detach()), out.loss.detach(), gradients(model)


def distance(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def assert_same(got, want, truth):
    """Logits, loss and gradients equal to 1e-6 of their norm. Where a gradient differs by more, fp64 decides: it may be
    twice as far from it as one process is for the worst parameter of that name. A_log and dt_bias have a few numbers a
    layer, small rests of sums over all tokens, where the error of one process is a matter of luck: all layers count
    together, to GATE_LIMIT. `exact_runs` (fp64, 1e-12) is what would see a mistake in them."""
    assert distance(got[0], want[0]) <= LIMIT, distance(got[0], want[0])
    assert abs(float(got[1] - want[1])) <= LIMIT * float(want[1])
    assert got[2].keys() == want[2].keys()
    wrong = {name: e for name in want[2] if (e := distance(got[2][name], want[2][name])) > LIMIT}
    exact = truth()[2] if wrong else None
    for name, error in wrong.items():
        alike = [other for other in want[2] if other.split(".")[-1] == name.split(".")[-1]]
        if name.endswith(("A_log", "dt_bias")):
            ours, right = (torch.cat([g[other].double() for other in alike]) for g in (got[2], exact))
            found, limit = distance(ours, right), GATE_LIMIT
        else:
            found = distance(got[2][name], exact[name])
            limit = 2 * max(distance(want[2][other], exact[other]) for other in alike)
        assert found <= limit, (name, error, found, limit)


def equal_runs(family, heads, kind, size, mode, attention, ranks):
    model = build(family, heads)
    if not hasattr(model.model.layers[0].linear_attn, "conv1d"):  # OLMo Hybrid before Transformers 5.15
        return refused(lambda: sequence_parallel(model, ranks.groups[size], mode), "in modules of their own")
    with sequence_parallel(model, ranks.groups[size], mode, attention=attention, grad_reduction="sum") as handle:
        got = together(handle, model, batch(kind))
    if ranks.rank == 0:  # the others need not know
        assert_same(got, alone(family, heads, kind), lambda: alone(family, heads, kind, torch.float64))


def exact_runs(size, mode, attention, ranks):
    """The same in fp64, where nothing but a mistake is visible. The loss itself is fp32 in Transformers."""
    model, kind = build("qwen3_5", dtype=torch.float64), (30, 1, 70)
    with sequence_parallel(model, ranks.groups[size], mode, attention=attention, grad_reduction="sum") as handle:
        got = together(handle, model, batch(kind))
    if ranks.rank == 0:
        want = alone("qwen3_5", "two", kind, torch.float64)
        assert distance(got[0], want[0]) <= 1e-12
        assert got[2].keys() == want[2].keys()
        assert all(distance(got[2][name], want[2][name]) <= 1e-12 for name in want[2])


def refused(call, text):
    """Raises here as on every other rank, and soon."""
    start = time.monotonic()
    with pytest.raises(SequenceParallelError, match=text):
        call()
    assert time.monotonic() - start < 30  # 5 s on an idle machine


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
    model, ids = build("qwen3_5"), tiny.tokens(3, 24)
    mask = torch.ones_like(ids)
    mask[0, :7], mask[2, 15:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 7] = -100
    given = dict(input_ids=ids, labels=labels, attention_mask=mask)

    def one_process(model):
        model.zero_grad()
        out = model(**given, use_cache=False)
        out.loss.backward()
        return out.logits[mask.bool()].detach(), out.loss.detach(), gradients(model)

    want = one_process(model)
    with sequence_parallel(model, ranks.groups[3], "chain", grad_reduction="sum") as handle:
        logits, loss, found = together(handle, model, given)
        logits = handle.restore(logits)
    exact = functools.partial(one_process, build("qwen3_5", dtype=torch.float64))
    assert_same((logits[mask.bool()], loss, found), want, exact)


def bad_steps(ranks):
    """One rank's input is wrong: all raise, and the group works afterwards."""
    model, group, rank = build("qwen3_5"), ranks.groups[3], ranks.rank
    good, want = batch((30, 11)), alone("qwen3_5", "two", (30, 11))
    wrong = {
        "rank 1: .*expected integers": dict(good, input_ids=good["input_ids"].float()),
        "rank 1: .*labels": dict(good, labels=good["labels"][:, :-1]),
        "rank 1: .*cu_seq_lens_q": dict(good, cu_seq_lens_q=torch.tensor([0, 50, 41], dtype=torch.int32)),
        "rank 1: .*disagree": dict(good, cu_seq_lens_q=torch.tensor([0, 20, 41], dtype=torch.int32)),
        "input_ids differ between rank 0 and rank 1": dict(good, input_ids=good["input_ids"] + 1),
        "tokens differ .*41 and 17": batch(17),
        "rank 1: .*no cache": dict(good, use_cache=True),
    }
    with sequence_parallel(model, group, "chain", grad_reduction="sum") as handle:
        for text, bad in wrong.items():
            refused(lambda bad=bad: model(**(bad if rank == 1 else good)), text)

        def fails_early():
            with handle.step():
                if rank == 2:
                    raise OSError("the data is gone")
                model(**good)

        if rank == 2:
            with pytest.raises(SequenceParallelError, match="rank 2: OSError: the data is gone"):
                fails_early()
        else:
            refused(fails_early, "rank 2: OSError: the data is gone")
        with torch.set_grad_enabled(rank != 1):
            refused(lambda: model(**good), "grad mode differ")
        got = together(handle, model, good)
    if rank == 0:
        assert_same(got, want, lambda: alone("qwen3_5", "two", (30, 11), torch.float64))


def refusals(ranks):
    model, group = build("qwen3_5"), ranks.groups[3]
    refused(lambda: sequence_parallel(model, group, "heads"), "2 key heads for 3 ranks")
    refused(lambda: sequence_parallel(model, group, "chain", attention="heads"), "2 KV heads for 3 ranks")
    other = tiny.build("qwen3_5") if ranks.rank == 1 else model
    refused(lambda: sequence_parallel(other, group), "rank 1: .*call tidegate.patch")
    refused(lambda: sequence_parallel(model, group, ("chain", "scan", "auto")[ranks.rank]), "settings differ")
    with sequence_parallel(model, group, "chain"):
        refused(lambda: model(**batch(20)), "grad_reduction")
        refused(lambda: sequence_parallel(model, group), "already")
        with torch.no_grad():
            assert model(**batch(20)).loss > 0


def scaling(ranks):
    """One step of SGD, for gradients that are averaged and for those that are summed."""
    want = None
    for reduction in (None, "mean", "sum"):
        model = copy.deepcopy(build("qwen3_5"))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if reduction is None:
            model(**batch((30, 11)), use_cache=False).loss.backward()
        else:
            handle = sequence_parallel(model, ranks.groups[3], "chain", grad_reduction=reduction)
            together(handle, model, batch((30, 11)))
        optimizer.step()
        found = {name: p.detach() for name, p in model.named_parameters()}
        want = found if reduction is None else want
        assert all(distance(found[name], want[name]) <= LIMIT for name in want)


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
    assert_same(got, (*want[:2], trained), lambda: exact)


def empty_shard(ranks):
    """A rank without a token, in every mode; and cuts inside of the convolution's window."""
    model = build("qwen3_5_moe")
    for mode in ("chain", "scan"):
        for starts in ((0, 20, 20, 41), (0, 0, 40, 41), (0, 39, 40, 41)):
            with sequence_parallel(model, ranks.groups[3], mode, grad_reduction="sum") as handle:
                got = together(handle, model, handle.shard(batch((30, 11)), starts))
            if ranks.rank == 0:
                want, exact = (alone("qwen3_5_moe", "two", (30, 11), t) for t in (torch.float32, torch.float64))
                assert_same(got, want, lambda exact=exact: exact)


def router_loss(ranks):
    model = build("qwen3_5_moe")
    given = dict(batch((30, 11)), output_router_logits=True)

    def one_process(model):
        model.zero_grad()
        out = model(**given, use_cache=False)
        out.loss.backward()
        return out.logits.detach(), out.loss.detach(), gradients(model), out.aux_loss.detach()

    want = one_process(model)
    with sequence_parallel(model, ranks.groups[3], "scan", grad_reduction="sum") as handle:
        got = together(handle, model, given)
        with torch.no_grad():
            aux = model(**given).aux_loss
        shard = torch.nn.functional.softmax(model(**batch((30, 11))).logits, -1)
        entropy = handle.gather(-(shard * shard.log()).sum(-1)).detach()
    assert abs(float(aux - want[3])) <= LIMIT * float(want[3])
    assert_same(got, want[:3], lambda: one_process(build("qwen3_5_moe", dtype=torch.float64)))
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


def sharded_parameters(ranks):
    """FSDP2 over the same ranks: it averages gradients."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = copy.deepcopy(build("qwen3_5"))
    mesh = DeviceMesh.from_group(ranks.groups[2], "cpu", mesh_dim_names=("sp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sequence_parallel(model, mesh["sp"], "chain", grad_reduction="mean")
    loss = model(**batch((30, 11))).loss
    loss.backward()
    want = alone("qwen3_5", "two", (30, 11))
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    exact = alone("qwen3_5", "two", (30, 11), torch.float64)
    assert_same((want[0], loss.detach(), found), want, lambda: exact)


def averaged_by_ddp(ranks):
    model = copy.deepcopy(build("qwen3_5"))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=ranks.groups[2])
    sequence_parallel(wrapped, ranks.groups[2], "heads", grad_reduction="mean")
    loss = wrapped(**batch((30, 11))).loss
    loss.backward()
    want, exact = (alone("qwen3_5", "two", (30, 11), t) for t in (torch.float32, torch.float64))
    assert_same((want[0], loss.detach(), gradients(model)), want, lambda: exact)


def two_dimensions(ranks):
    """Two rows of data, each cut among two ranks; FSDP2 over all four."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    model, kinds = copy.deepcopy(build("qwen3_5")), ((30, 11), (20, 25))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sequence_parallel(model, mesh["sequence"], "chain", grad_reduction="mean")
    loss = model(**batch(kinds[mesh.get_local_rank("data")])).loss
    loss.backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    def mean(dtype):
        a, b = (alone("qwen3_5", "two", kind, dtype) for kind in kinds)
        return a[0], loss.detach(), {name: (a[2][name] + b[2][name]) / 2 for name in a[2]}

    want = mean(torch.float32)
    assert_same((want[0], loss.detach(), found), want, lambda: mean(torch.float64))


def undone(ranks):
    model = tiny.build("qwen3_5")
    patched = tidegate.patch(model)
    before = {name: set(m.__dict__) for name, m in model.named_modules()}
    rows = len(patched.report())
    handle = sequence_parallel(model, ranks.groups[2], grad_reduction="sum")
    with torch.no_grad():
        local = model(**batch(700)).logits
    assert local.shape[1] < 700 and "tokens a rank, expected for a layer" in handle.report()
    assert patched.report()[-1].op == "sequence_parallel" and len(patched.report()) == rows + 1
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(twin(**batch(700)).logits, local)
    handle.undo()
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == before and len(patched.report()) == rows
    with torch.no_grad():
        assert model(**batch(700), use_cache=False).logits.shape[1] == 700


def text_model_alone(ranks):
    """Without a head there is no loss; the hidden states are a shard."""
    model = build("qwen3_5").model
    with torch.no_grad():
        want = model(**{k: v for k, v in batch((30, 11)).items() if k != "labels"}).last_hidden_state
        with sequence_parallel(model, ranks.groups[2], "scan") as handle:
            given = {k: v for k, v in batch((30, 11)).items() if k != "labels"}
            got = handle.gather(model(**given).last_hidden_state)
    assert distance(got, want) <= LIMIT


KINDS = (40, 41, 1000, (3, 30, 1, 500, 66, 400))


def cases():
    found = {}

    def add(name, size, function):
        found[name] = lambda ranks: function(ranks) if ranks.rank < size else None

    def runs(size, kind, family="qwen3_5", heads="two", mode="chain", attention="auto"):
        name = f"{family}-{heads}-{mode}-{attention}-{size}-{kind if isinstance(kind, int) else 'pack'}"
        add(name, size, functools.partial(equal_runs, family, heads, kind, size, mode, attention))

    add("two-dimensions", 4, two_dimensions)  # first: it makes groups, and later some ranks have nothing to do for long
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
        add(f"exact-{mode}", size, functools.partial(exact_runs, size, mode, attention))
    add("empty-shard", 3, empty_shard)
    add("length-that-does-not-divide", 2, length_that_does_not_divide)
    add("padded-batches", 3, padded_batches)
    add("bad-steps", 3, bad_steps)
    add("refusals", 3, refusals)
    add("scaling", 3, scaling)
    add("partly-frozen", 3, partly_frozen)
    add("router-loss", 3, router_loss)
    add("checkpointing", 3, checkpointing)
    add("sharded-parameters", 2, sharded_parameters)
    add("averaged-by-ddp", 2, averaged_by_ddp)
    add("undone", 2, undone)
    add("text-model-alone", 2, text_model_alone)
    return found


NAMES = list(cases())


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return harness.run(cases, NAMES, WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_ranks(failures, name):
    assert not failures[name], "\n".join(failures[name])

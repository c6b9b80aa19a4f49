"""What the tests of sequence parallelism share: models, batches, one process's answers, and how close they must be."""

import functools
import time
from importlib.metadata import version

import pytest
import tiny_models as tiny
import torch
import torch.distributed as dist

import tidegate
from tidegate.errors import SequenceParallelError

# Layers of Transformers before 5.9 keep arguments from their linear attention; sequence parallelism refuses them.
SUPPORTED = tuple(int(part) for part in version("transformers").split(".")[:2]) >= (5, 9)
needs_support = pytest.mark.skipif(not SUPPORTED, reason="this release of Transformers is refused, which is tested")

LIMIT = 1e-6
HEAD_LIMIT = LIMIT  # of A_log and dt_bias of a single head, of its terms
GATE_LIMIT = 1e-5  # of A_log and dt_bias of all layers; one process is up to 5e-6 from fp64 (sequence_precision.py)
HEADS = {"two": {}, "three": dict(linear_num_key_heads=3, linear_num_value_heads=9, num_attention_heads=3)}
HEADS["three"]["num_key_value_heads"] = 3  # 2 and 4 do not divide it
GATES = ("A_log", "dt_bias")


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


def _decays(layer, projected):
    """The part a [..., HV] of what a layer's projection gave; Qwen3-Next has b and a of a key head side by side."""
    if not hasattr(layer, "in_proj_ba"):
        return projected
    pairs = projected.unflatten(-1, (layer.num_k_heads, -1))
    return pairs[..., pairs.shape[-1] // 2 :].flatten(-2)


class GateTerms:
    """The terms that gradients of A_log and dt_bias are sums of, one a token and head; seen in a run of one process.

    g = -exp(A_log) softplus(z) with z = a + dt_bias: that of dt_bias is the sum of da, that of A_log the sum of
    da softplus(z) / sigmoid(z).
    """

    def __init__(self, model):
        self.terms, self.hooks = {}, []
        for path, layer in model.named_modules():
            if hasattr(layer, "A_log"):
                name = next(n for n in ("in_proj_a", "a_proj", "in_proj_ba") if hasattr(layer, n))
                hook = functools.partial(self._seen, path, layer)
                self.hooks.append(getattr(layer, name).register_forward_hook(hook))

    def _seen(self, path, layer, module, args, out):
        out.register_hook(functools.partial(self._differentiated, path, layer, out.detach()))

    def _differentiated(self, path, layer, out, gradient):
        z, da = (_decays(layer, x).flatten(0, -2) for x in (out, gradient))
        z = z + layer.dt_bias.detach()
        self.terms[f"{path}.dt_bias"] = da
        self.terms[f"{path}.A_log"] = da * torch.nn.functional.softplus(z) / z.sigmoid()

    def of(self, found):
        """The terms [tokens, heads] by parameter; their sums must be the gradients found."""
        for hook in self.hooks:
            hook.remove()
        for name, terms in self.terms.items():
            rounding = 1e-10 if terms.dtype == torch.float64 else LIMIT
            error, size = (terms.double().sum(0) - found[name].double()).abs(), terms.double().abs().sum(0)
            assert bool((error <= rounding * size).all()), (name, error / size)
        return self.terms


def one_process(model, arguments, kept=slice(None)):
    """Logits, loss, gradients, and the terms of the gates' gradients. kept: the tokens whose logits count."""
    model.zero_grad()
    gates = GateTerms(model)
    out = model(**arguments, use_cache=False)
    out.loss.backward()
    found = gradients(model)
    return out.logits[kept].detach(), out.loss.detach(), found, gates.of(found)


@functools.cache
def alone(family, heads, kind, dtype=torch.float32):
    return one_process(build(family, heads, dtype), batch(kind))


def together(handle, model, arguments):
    """The same of this process and the others of its group."""
    model.zero_grad()
    out = model(**arguments)
    out.loss.backward()
    handle.reduce_gradients()
    return handle.gather(out.logits.detach()), out.loss.detach(), gradients(model)


def distance(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def far(name, got, want):
    """How far a run's gradient is from another's, of its norm. Gradients of A_log and dt_bias are small rests of sums
    over all tokens: they are judged by the sums of their terms' absolute values, which is what rounding can keep."""
    difference = (got[2][name].double() - want[2][name].double()).norm()
    size = want[3][name].double().abs().sum(0) if name.endswith(GATES) else want[2][name].double()
    return float(difference / size.norm().clamp(min=1e-30))


def far_heads(name, got, want):
    """The same of every number of A_log or dt_bias, of its own terms."""
    difference = (got[2][name].double() - want[2][name].double()).abs()
    return difference / want[3][name].double().abs().sum(0).clamp(min=1e-300)


def joined(run, gate):
    return torch.cat([gradient.double() for name, gradient in run[2].items() if name.endswith(gate)])


def assert_same(got, want, truth, strict=True):
    """Logits, loss and gradients equal to 1e-6 of their norm. strict=False, where chunks or experts' rows lie otherwise
    than in one process, or one process itself is farther than that from fp64 by far: where a gradient differs by more,
    fp64 decides. It may be twice as far from it as one process is for the worst parameter of that name. `exact_runs`
    (fp64, 1e-12) is what would see a mistake in a gradient whose terms cancel; GATE_LIMIT is the closer bound for these
    on long rows."""
    assert distance(got[0], want[0]) <= LIMIT, distance(got[0], want[0])
    assert abs(float(got[1] - want[1])) <= LIMIT * float(want[1])
    assert got[2].keys() == want[2].keys()
    exact = functools.cache(truth)
    for gate in GATES:
        assert distance(joined(got, gate), joined(want, gate)) <= GATE_LIMIT, gate
        names = [name for name in want[2] if name.endswith(gate)]
        wide = torch.cat([far_heads(name, got, want) for name in names]) > HEAD_LIMIT
        if bool(wide.any()):
            ours, one = (torch.cat([far_heads(name, run, exact()) for name in names]) for run in (got, want))
            assert bool((ours[wide] <= 2 * one.max()).all()), (gate, ours[wide], one.max())
    for name in want[2]:
        if far(name, got, want) > LIMIT:
            assert not strict, (name, far(name, got, want))
            alike = [other for other in want[2] if other.split(".")[-1] == name.split(".")[-1]]
            limit = 2 * max(far(other, want, exact()) for other in alike)
            assert far(name, got, exact()) <= limit, (name, far(name, got, want), limit)


def refused(call, text, group=None):
    """Raises on every rank of the group, within 5 s, and the group works afterwards: it gathers the times.

    They count from when the last rank came: how long ranks have other things to do before is not the refusal's. All
    run on one machine, whose monotonic clock they share.
    """
    came = time.monotonic()
    with pytest.raises(SequenceParallelError, match=text):
        call()
    times = torch.tensor([came, time.monotonic()], dtype=torch.float64)
    everyone = [torch.empty_like(times) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, times, group=group)
    last_came, last_left = torch.stack(everyone).amax(0).tolist()
    assert last_left - last_came < 5, last_left - last_came


class Cases(dict):
    """The cases of a file by name; the first `size` processes take part in one."""

    def add(self, name, size, function):
        self[name] = lambda ranks: function(ranks) if ranks.rank < size else None

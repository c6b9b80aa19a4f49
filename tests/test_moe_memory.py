"""No call of the experts takes memory of the weights' size, in any layout, forward or backward: peak of the process."""

import ctypes
import gc
import pathlib

import pytest
import torch

import tidegate

STATUS, REFS = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")
E, H, WIDTH, T, SLOTS = 24, 1024, 512, 96, 2
GATE_UP = E * 2 * WIDTH * H * 2  # bytes of the weight, 50 MB
ACTIVATIONS = T * SLOTS * (H + 2 * WIDTH) * 4  # of all pairs in fp32, 1.6 MB
KEPT = T * SLOTS * 2 * WIDTH * 4  # gate and up of all pairs, which a training forward leaves for its backward, 0.8 MB
ROOM = 8 << 20  # huge pages of both threads' scratch memory, and what torch and the allocator do


def _kilobytes(name):
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(name))


def needed(call):
    """Bytes that a call needs beyond what is there: all that the process has touched, whoever allocated it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would serve a copy unseen
    REFS.write_text("5")
    before = _kilobytes("VmRSS")
    call()
    return 1024 * (_kilobytes("VmHWM") - before)


@pytest.fixture(scope="module")
def layer():
    try:
        REFS.write_text("5")
    except OSError as problem:
        pytest.skip(f"the peak of memory cannot be reset here: {problem}")
    if tidegate.isa() == "fallback":
        pytest.skip("plain torch widens a weight at a time")
    torch.manual_seed(0)
    weights = [(torch.randn(E, 2 * WIDTH, H) / 32).bfloat16(), (torch.randn(E, H, WIDTH) / 23).bfloat16()]
    call = torch.randn(T, H).bfloat16(), torch.randint(0, E, (T, SLOTS)), torch.rand(T, SLOTS)
    tidegate.moe_experts(*call, *weights)  # libraries and threads are there
    return call, weights


def forms(weights):
    yield "as stored", weights, "nk"
    yield "transposed view", [w.mT for w in weights], "kn"
    yield "[E,K,N] in memory", [w.mT.contiguous() for w in weights], "kn"


def test_the_measure_sees_a_copy(layer):
    _, weights = layer
    assert needed(lambda: weights[0].mT.contiguous()) > 0.9 * GATE_UP


def test_forward(layer):
    call, weights = layer
    for name, pair, axes in forms(weights):
        assert needed(lambda: tidegate.moe_experts(*call, *pair, weight_axes=axes)) < ACTIVATIONS + ROOM, name  # noqa: B023


def test_backward_of_frozen_weights(layer):
    (x, ids, weights_of), weights = layer

    def step(pair, axes):
        leaf, w = x.clone().requires_grad_(), weights_of.clone().requires_grad_()
        tidegate.moe_experts(leaf, ids, w, *pair, weight_axes=axes).sum().backward()

    for name, pair, axes in forms(weights):
        assert needed(lambda: step(pair, axes)) < 2 * ACTIVATIONS + KEPT + ROOM, name  # noqa: B023


def test_backward_of_lora(layer):
    (x, ids, weights_of), weights = layer
    shapes = ((E, 4, H), (E, 2 * WIDTH, 4), (E, 4, WIDTH), (E, H, 4))
    a, b, c, d = (torch.randn(*s).bfloat16().requires_grad_() for s in shapes)

    def step(pair, axes):
        more = dict(gate_up_lora=(a, b, 0.5), down_lora=(c, d, 0.5), weight_axes=axes)
        tidegate.moe_experts(x, ids, weights_of, *pair, **more).sum().backward()

    for name, pair, axes in forms(weights):
        assert needed(lambda: step(pair, axes)) < 2 * ACTIVATIONS + KEPT + ROOM, name  # noqa: B023


def test_all_gradients_into_memory_that_is_there(layer):
    (x, ids, w), weights = layer
    for name, pair, axes in forms(weights):
        out = dict(dx=torch.ones_like(x), dweights=torch.ones_like(w))
        out |= dict(dgate_up=torch.ones_like(pair[0]), ddown=torch.ones_like(pair[1]))

        def step():
            tidegate.ops.moe_experts_bwd.out(x, x, ids, w, *pair, weight_axes=axes, **out)  # noqa: B023

        assert needed(step) < 2 * ACTIVATIONS + ROOM, name

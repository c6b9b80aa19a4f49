"""Experts that do not train cost no product for a gradient of their weights.

Times on a machine with other work are noise, so what is asserted is what makes the time: which gradients the operator
is asked for, and that the product for one that nobody asked for does not run. With gate and up kept by the forward,
that product is the only one in a backward that reads x; so x is taken away, and a process that reads it ends.
"""

import ctypes
import mmap
import multiprocessing
import signal

import pytest
import tiny_models
import torch

import tidegate

DGATE_UP, DDOWN = 1 << 2, 1 << 3  # bits of `needs`: dx, dweights, dgate_up, ddown, ...
WEIGHTS = DGATE_UP | DDOWN
T, H, WIDTH, E, SLOTS = 64, 128, 96, 4, 2


class Asked(torch.utils._python_dispatch.TorchDispatchMode):
    """`needs` of every backward of experts, and whether the gradients of both weights are empty."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.tidegate.moe_experts_bwd.default:
            self.seen.append((kwargs.get("needs", 4095), [gradient.numel() == 0 for gradient in out[2:4]]))
        return out


native = pytest.mark.skipif(tidegate.isa() == "fallback", reason="patch leaves experts to the model")


@native
@pytest.mark.parametrize("frozen", ["", "gate_up_proj", "down_proj", "gate_up_proj down_proj"])
def test_a_model_asks_for_what_trains(frozen):
    model = tiny_models.build("qwen3_5_moe", layers=2)
    tidegate.patch(model, ops=("experts",))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (".experts." in name and name.split(".")[-1] in frozen.split()))
    ids = tiny_models.tokens(1, 20)
    with Asked() as asked:
        model(ids, labels=ids, use_cache=False).loss.backward()
    without = ["gate_up_proj" in frozen, "down_proj" in frozen]
    want = (not without[0]) * DGATE_UP | (not without[1]) * DDOWN
    assert len(asked.seen) == 2
    for needs, empty in asked.seen:
        assert needs & WEIGHTS == want and needs & 1 and empty == without


def test_lora_asks_for_its_factors_alone():
    x, ids, w, gate_up, down = problem()
    factors = [torch.randn(*s).requires_grad_() for s in ((E, 4, H), (E, 2 * WIDTH, 4))]
    with Asked() as asked:
        tidegate.moe_experts(x, ids, w, gate_up, down, gate_up_lora=(*factors, 0.5)).sum().backward()
    assert asked.seen == [(1 << 8 | 1 << 9, [True, True])]


def problem(x=None):
    x = torch.randn(T, H) if x is None else x.copy_(torch.randn(T, H))
    ids, weights = torch.randint(0, E, (T, SLOTS)), torch.rand(T, SLOTS)
    return x, ids, weights, torch.randn(E, 2 * WIDTH, H) / 8, torch.randn(E, H, WIDTH) / 8


def without_x(needs):
    """A backward after which nobody can read x; in a process of its own."""
    torch.set_num_threads(1)
    memory = mmap.mmap(-1, T * H * 4)
    inputs = problem(torch.frombuffer(memory, dtype=torch.float32).view(T, H))
    dout = torch.randn(T, H)
    _, hidden = tidegate.ops.moe_experts_fwd(*inputs, save_hidden=True)
    want = tidegate.ops.moe_experts_bwd(dout, *inputs, hidden=hidden, needs=needs)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(inputs[0].data_ptr())
    assert libc.mprotect(address, ctypes.c_size_t(len(memory)), 0) == 0, ctypes.get_errno()
    got = tidegate.ops.moe_experts_bwd(dout, *inputs, hidden=hidden, needs=needs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@native
def test_the_product_does_not_run():
    spawned = multiprocessing.get_context("spawn")
    ends = {}
    for needs in (3, 3 | DDOWN, 3 | DGATE_UP):
        process = spawned.Process(target=without_x, args=(needs,))
        process.start()
        process.join()
        ends[needs] = process.exitcode
    assert ends == {3: 0, 3 | DDOWN: 0, 3 | DGATE_UP: -signal.SIGSEGV}  # the last shows that reading x is seen

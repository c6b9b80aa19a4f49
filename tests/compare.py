"""How results are compared: errors against the truth, and bits against bits."""

import contextlib

import torch

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def error(x, truth):
    """Relative RMS error."""
    truth = truth.double()
    return ((x.double() - truth).square().mean() / truth.square().mean()).sqrt().item()


def assert_close(name, x, truth, limit, plain=None):
    """limit bounds the error before rounding; a 16-bit result may have that of the rounded truth besides (1.66e-3 for
    bf16). plain is the same formula evaluated in fp32: the largest error may be at most twice its largest."""
    assert x.shape == truth.shape, f"{name}: shape {list(x.shape)} instead of {list(truth.shape)}"
    if truth.numel() == 0:
        return
    assert torch.isfinite(x).all(), f"{name}: not finite"
    if not truth.any():
        assert not x.any(), f"{name}: not zero"
        return
    if x.element_size() == 2:
        limit += 1.01 * error(truth.to(x.dtype), truth)
    rms = error(x, truth)
    assert rms <= limit, f"{name}: relative RMS error {rms:.3g} > {limit:.3g}"
    if plain is None:
        return
    plain = plain.to(x.dtype).double()
    slack = truth.abs().max() * 2.0**-23  # one ulp of the largest value: few plain results can be exact by luck
    worst, allowed = (x.double() - truth).abs().max(), 2 * (plain - truth).abs().max() + slack
    assert worst <= allowed, f"{name}: largest error {worst:.3g} > {allowed:.3g}, twice that of plain fp32"


def bits(x):
    """The memory of x as integers, so that NaN equals itself and 0 differs from -0."""
    return x.detach().contiguous().view(BITS[x.element_size()])


def same_bits(x, y):
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))


def assert_bits(name, x, y):
    assert x.dtype == y.dtype, f"{name}: {x.dtype} instead of {y.dtype}"
    assert x.shape == y.shape, f"{name}: shape {list(x.shape)} instead of {list(y.shape)}"
    different = bits(x) != bits(y)
    assert not different.any(), f"{name}: {int(different.sum())} of {x.numel()} values differ in bits"


def assert_all_bits(results, expected):
    """Two dicts of tensors."""
    assert results.keys() == expected.keys()
    for name, value in results.items():
        assert_bits(name, value, expected[name])


def leaves(*tensors):
    """Copies that collect gradients; None stays None."""
    return [t if t is None else t.detach().clone().requires_grad_() for t in tensors]


@contextlib.contextmanager
def flushed_denormals():
    """Runs a block with FTZ and DAZ set, and checks that the block left them set."""
    tiny = torch.tensor([1e-39])
    assert torch.set_flush_denormal(True)
    try:
        yield
        assert (tiny * 1).item() == 0, "the call cleared the caller's FTZ/DAZ bits"
    finally:
        torch.set_flush_denormal(False)
    assert (tiny * 1).item() != 0

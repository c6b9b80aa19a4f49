"""Forward mode and torch.func: what our operators do not have is refused, for every operator in the registry."""

import pytest
import torch
from samples import arguments, operators, overload, samples
from test_torch_features import DIFFERENTIABLE, INTEGERS_ONLY, Call, assert_same, copied, outcome, public
from torch.autograd import forward_ad

import tidegate


@pytest.mark.parametrize("name", [name for name in operators() if name.partition(".")[0] not in INTEGERS_ONLY])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_tangents_are_refused(name, mode):
    """Without the refusal torch drops them, and every derivative would be zero."""
    refused = rf"forward-mode AD is not supported by tidegate::{name}: "
    for call in samples(name):
        tensors = {k: v for k, v in Call.tensors(name, *copied(*call)).items() if v.is_floating_point()}
        assert tensors
        for target, value in tensors.items():
            args, kwargs = copied(*call)
            given = arguments(overload(name), args, kwargs)
            with forward_ad.dual_level(), mode(), pytest.raises(NotImplementedError, match=refused):
                overload(name)(**{**given, target: forward_ad.make_dual(value, torch.ones_like(value))})
            module = Call(name, args, kwargs)
            rest = {k: v for k, v in Call.tensors(name, args, kwargs).items() if k != target}
            with mode(), pytest.raises(NotImplementedError, match=refused):
                torch.func.jvp(lambda t: module(**rest, **{target: t}), (value,), (value,))  # noqa: B023


@pytest.mark.parametrize("name", operators())
def test_calls_without_tangents_work_beside_others(name):
    for call in samples(name):
        want = outcome(overload(name), name, *copied(*call))
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.ones(2), torch.ones(2))
            assert_same(outcome(overload(name), name, *copied(*call)), want)
            with forward_ad._set_fwd_grad_enabled(False):
                args, kwargs = copied(*call)
                args = [
                    forward_ad.make_dual(a, a) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
                    for a in args
                ]
                overload(name)(*args, **kwargs)


def test_forward_mode_is_refused_in_every_form():
    x = torch.randn(2, 8)
    refused = "forward-mode AD is not supported by tidegate::l2norm_fwd"
    call = lambda t: tidegate.ops.l2norm_fwd(t)[0]  # noqa: E731
    with pytest.raises(NotImplementedError, match=refused):
        torch.func.jacfwd(call)(x)
    compiled = torch.compile(lambda t: torch.func.jvp(call, (t,), (t,)), backend="aot_eager")
    with pytest.raises(Exception, match=refused):
        compiled(x)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_transforms_that_differentiate_are_refused(name):
    """torch's own text is about a class that nobody has written."""
    args, kwargs = copied(*samples(name)[0], grad=True)
    place = next((i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad), None)
    if place is None:
        return

    def loss(value):
        out = public(name)(*args[:place], value, *args[place + 1 :], **kwargs)
        return (out[0] if isinstance(out, tuple) else out).float().sum()

    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(NotImplementedError, match=f"not supported by tidegate::{name}: use torch.autograd.grad"):
            transform(loss)(args[place].detach())

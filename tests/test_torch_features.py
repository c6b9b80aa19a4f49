"""What torch asks of an operator, for every operator and .out form in the registry: opcheck, compile, export, inference
mode, version counters, clear refusals. An operator without a sample fails in test_every_operator_has_a_sample."""

import pytest
import torch
from compare import assert_bits, leaves
from samples import SAMPLES, arguments, operators, out_call, overload, results, samples, written
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import tidegate

NO_GRADIENT = {
    "gdn_segment_combine": "a gradient is not supported yet",
    "gdn_segment_map": "a gradient is not supported yet",
}
INTEGERS_ONLY = {"moe_init_routing", "seqlens"}
DIFFERENTIABLE = [name for name in operators() if name.endswith("_fwd") and name not in NO_GRADIENT]
BACKWARD = [name for name in operators() if name.endswith("_bwd")]
OUT = [name for name in operators() if name.endswith(".out")]
MUTABLE = [
    name
    for name in operators()
    if overload(name)._schema.is_mutable
    and name.partition(".")[0] not in INTEGERS_ONLY  # nothing could want a gradient
]


def public(name):
    base, _, form = name.partition(".")
    operator = getattr(tidegate.ops, base)
    return operator.out if form else operator


def copied(args, kwargs, grad=False):
    """The same call on fresh memory with the same strides."""

    def copy(value):
        if not isinstance(value, torch.Tensor):
            return value
        fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value.detach())
        return fresh.requires_grad_(grad and value.requires_grad)

    return [copy(v) for v in args], {k: copy(v) for k, v in kwargs.items()}


def outcome(call, name, args, kwargs):
    """Everything that a call returns or writes."""
    values = call(*args, **kwargs)
    values = values if isinstance(values, (tuple, list)) else (values,)
    found = {f"result {i}": value for i, value in enumerate(values) if isinstance(value, torch.Tensor)}
    given = arguments(overload(name), args, kwargs)
    return found | {target: given[target] for target in written(overload(name)) if target in given}


class Call(torch.nn.Module):
    """A call whose tensors are inputs and whose other arguments are constants."""

    def __init__(self, name, args, kwargs):
        super().__init__()
        self.operator = public(name)
        given = arguments(overload(name), args, kwargs)
        self.constants = {k: v for k, v in given.items() if not isinstance(v, torch.Tensor)}

    def forward(self, **tensors):
        return self.operator(**self.constants, **tensors)

    @staticmethod
    def tensors(name, args, kwargs):
        return {k: v for k, v in arguments(overload(name), args, kwargs).items() if isinstance(v, torch.Tensor)}


def assert_same(got, want):
    assert got.keys() == want.keys() and want
    for name, value in want.items():
        assert_bits(name, got[name], value)


def gradients(call, args, kwargs):
    """Gradients of all inputs that want one, through all outputs that have one."""
    outputs = call(*args, **kwargs)
    outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o.requires_grad and o.numel()]
    inputs = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return dict(enumerate(torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs])))


def test_every_operator_has_a_sample():
    assert {name.partition(".")[0] for name in operators()} == set(SAMPLES)
    without_out = {name for name in operators() if "." not in name and name + ".out" not in OUT}
    # linear is grouped_matmul with one group, and that has the form.
    assert without_out == {"linear_fwd", "linear_bwd", "mrope_cos_sin", "seqlens"}


@pytest.mark.parametrize("name", operators())
def test_opcheck(name):
    for call in samples(name):
        args, kwargs = copied(*call, grad=name not in BACKWARD)  # a backward has no gradient of its own
        torch.library.opcheck(overload(name), args, kwargs)


@pytest.mark.parametrize("name", operators())
def test_same_bits_in_every_mode(name):
    """Eager, through tidegate.ops, compiled as one graph, exported, in inference mode."""
    for call in samples(name):
        want = outcome(overload(name), name, *copied(*call))
        assert_same(outcome(public(name), name, *copied(*call)), want)
        with torch.inference_mode():
            assert_same(outcome(overload(name), name, *copied(*call)), want)
        module, tensors = Call(name, *call), lambda: Call.tensors(name, *copied(*call))  # noqa: B023
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert_same(outcome(compiled, name, (), tensors()), want)
        exported = torch.export.export(module, (), tensors())
        assert_same(outcome(exported.module(), name, (), tensors()), want)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_compiled_gradients_have_the_same_bits(name):
    for call in samples(name):
        args, kwargs = copied(*call, grad=True)
        if not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            continue
        want = gradients(overload(name), args, kwargs)
        torch._dynamo.reset()
        compiled = torch.compile(lambda *a, **k: public(name)(*a, **k), fullgraph=True, backend="aot_eager")
        assert_same(gradients(compiled, args, kwargs), want)


@pytest.mark.parametrize("name", OUT)
def test_out_form_writes_what_the_functional_form_returns(name):
    base = name.partition(".")[0]
    for call in SAMPLES[base]():
        args, kwargs = out_call(base, *call)
        want = {k: v for k, v in results(base, *call).items() if k in kwargs}
        assert want
        overload(name)(*args, **kwargs)
        assert_same({k: kwargs[k] for k in want}, want)


@pytest.mark.parametrize("name", MUTABLE)
def test_mutable_forms_are_for_inference(name):
    op = overload(name)
    for call in samples(name):
        args, kwargs = copied(*call)
        before = {k: v.detach().clone() for k, v in arguments(op, args, kwargs).items() if k in written(op)}
        place = next(i for i, a in enumerate(args) if torch.is_tensor(a) and a.is_floating_point())
        args[place] = args[place].clone().requires_grad_()
        base = name.partition(".")[0]
        with pytest.raises(RuntimeError, match=f"{base}: this form writes in place and is for inference only"):
            op(*args, **kwargs)
        for target, value in before.items():
            assert_bits(target, arguments(op, args, kwargs)[target], value)
        with torch.no_grad():
            op(*args, **kwargs)


@pytest.mark.parametrize("name", MUTABLE)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_mutable_forms_move_version_counters(name, mode):
    args, kwargs = copied(*samples(name)[0])
    given = {k: v for k, v in arguments(overload(name), args, kwargs).items() if isinstance(v, torch.Tensor)}
    before = {k: v._version for k, v in given.items()}
    with mode():
        overload(name)(*args, **kwargs)
    for target, tensor in given.items():
        assert tensor._version == before[target] + (target in written(overload(name))), target


def test_a_changed_state_is_noticed_in_backward():
    (state,) = leaves(torch.randn(1, 8, 3))
    pool = state * 1
    loss = (pool * pool).sum()
    with torch.no_grad():
        tidegate.ops.causal_conv1d_update(torch.randn(1, 1, 8), pool, torch.randn(8, 4), layout="BSND")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_double_backward_raises(name):
    args, kwargs = copied(*samples(name)[0], grad=True)
    inputs = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    output = overload(name)(*args, **kwargs)
    output = output[0] if isinstance(output, tuple) else output
    first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match=r"_bwd: a gradient of a gradient \(double backward\) is not supported"):
        torch.autograd.grad(first[0].sum(), inputs)


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_a_missing_gradient_is_not_a_detached_result(name):
    for call in samples(name):
        for i in range(4):
            args, kwargs = copied(*call)
            args[i].requires_grad_()
            outputs = [o for o in overload(name)(*args, **kwargs) if o.numel()]
            assert all(o.requires_grad for o in outputs)
            with pytest.raises(RuntimeError, match=f"{name}: {NO_GRADIENT[name]}"):
                outputs[0].sum().backward()


def test_position_tables_have_no_gradient():
    (inv_freq,) = leaves(torch.rand(4))
    cos, _ = tidegate.ops.mrope_cos_sin(torch.zeros(1, 2, dtype=torch.int64), inv_freq, [2, 1, 1])
    with pytest.raises(RuntimeError, match="mrope_cos_sin: a gradient of the position tables is not supported"):
        cos.sum().backward()


def test_meta_tensors_give_shapes():
    for name in operators():
        for call in samples(name):
            args, kwargs = copied(*call)
            want = outcome(overload(name), name, args, kwargs)
            meta = lambda v: v.to("meta") if isinstance(v, torch.Tensor) else v  # noqa: E731
            got = outcome(overload(name), name, [meta(a) for a in args], {k: meta(v) for k, v in kwargs.items()})
            assert {k: (v.shape, v.stride(), v.dtype) for k, v in got.items()} == {
                k: (v.shape, v.stride(), v.dtype) for k, v in want.items()
            }, name
            assert all(v.is_meta for v in got.values())


def symbolic(mode, value, kind):
    """A fake tensor with a symbol for every size."""
    if not isinstance(value, torch.Tensor):
        return value
    return mode.from_tensor(value.detach(), symbolic_context=StatelessSymbolicContext([kind] * value.dim()))


@pytest.mark.parametrize("name", operators())
@pytest.mark.parametrize("kind", ["DYNAMIC", "UNBACKED"])
def test_shapes_ask_nothing_about_symbols(name, kind):
    """With UNBACKED symbols any question is an error, with DYNAMIC ones it is a guard: one more reason to recompile."""
    kind = getattr(DimDynamic, kind if hasattr(DimDynamic, kind) else "SIZE_LIKE_UNBACKED")  # before torch 2.12
    for args, kwargs in samples(name):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        args = [symbolic(mode, a, kind) for a in args]
        kwargs = {k: symbolic(mode, v, kind) for k, v in kwargs.items()}
        with mode:
            overload(name)(*args, **kwargs)
        assert not mode.shape_env.guards


def test_wrong_sizes_are_found_when_compiling():
    def call(x, weight):
        return tidegate.rms_norm(x, torch.cat([weight, weight[:1]]))

    for dynamic in (False, True):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="rms_norm_fwd: weight: expected shape"):
            torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")(torch.ones(3, 8), torch.ones(8))

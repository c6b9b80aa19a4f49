"""Every argument of every operator with wrong values: ValueError or TypeError that names operator, tensor, expected and
got, and nothing written; wrong sizes and types also where there is no memory. An argument without a row fails in
test_every_argument_has_a_row."""

import functools

import bad_input_chunk_backward
import bad_input_delta_rule
import bad_input_moe
import bad_input_recurrent
import bad_input_rows
import pytest
import torch
from compare import same_bits
from samples import SAMPLES, arguments, operators, overload, samples, written

import tidegate
from tidegate._contracts import CONTRACTS

ROWS = [
    row
    for module in (bad_input_rows, bad_input_delta_rule, bad_input_chunk_backward, bad_input_recurrent, bad_input_moe)
    for row in module.ROWS
]


def form(name):
    base, _, out = name.partition(".")
    return getattr(tidegate.ops, base).out if out else getattr(tidegate.ops, base)


@functools.cache
def calls(name):
    """The arguments of all samples, by name."""
    return [arguments(overload(name), *call) for call in samples(name)]


def call_with(name, argument):
    """A copy of the first sample that has `argument`; of the first one if none has it."""
    given = next((call for call in calls(name) if call.get(argument) is not None), calls(name)[0])
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}


def assert_refused(name, given, kind, text):
    before = {k: v.clone() for k, v in given.items() if isinstance(v, torch.Tensor) and not v.is_meta}
    with pytest.raises((ValueError, TypeError)) as caught:
        form(name)(**given)
    message = str(caught.value)
    assert caught.type is kind, f"{caught.type.__name__}: {message}"
    base = name.partition(".")[0]
    assert message.startswith(f"{base}: ") and ": expected " in message and ", got " in message, message
    assert text in message, f"{text!r} is not in {message!r}"
    for argument, value in before.items():
        assert same_bits(given[argument], value), f"{argument} was changed"


def schema_arguments(name):
    return {a.name for a in overload(name)._schema.arguments}


def tensor_arguments(name):
    """Names of the tensors among the arguments of all samples."""
    return sorted({k for call in calls(name) for k, v in call.items() if isinstance(v, torch.Tensor)})


EXPANDED = [  # a row counts for the functional and for the .out form, where both have the argument
    (name, *row[1:])
    for row in ROWS
    for name in ([row[0]] if "." in row[0] else [row[0], row[0] + ".out"])
    if name in operators() and row[1] in schema_arguments(name)
]


@pytest.mark.parametrize("name, argument, wrong, kind, text", EXPANDED, ids=lambda v: v if isinstance(v, str) else "")
def test_wrong_value(name, argument, wrong, kind, text):
    given = call_with(name, argument)
    given[argument] = wrong(given) if callable(wrong) else wrong
    assert_refused(name, given, kind, text)


def as_meta(given):
    return {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in given.items()}


@pytest.mark.parametrize("name, argument, wrong, kind, text", EXPANDED, ids=lambda v: v if isinstance(v, str) else "")
def test_wrong_size_or_type_without_memory(name, argument, wrong, kind, text):
    given = call_with(name, argument)
    right, given[argument] = given.get(argument), wrong(given) if callable(wrong) else wrong
    pair = [v for v in (right, given[argument]) if isinstance(v, torch.Tensor)]
    if len(pair) == 2 and (pair[0].shape != pair[1].shape or pair[0].dtype != pair[1].dtype):
        assert_refused(name, as_meta(given), kind, "expected ")
    elif argument in ("layout", "out_layout", "state_v_first") and not text.startswith("cu_seqlens["):
        assert_refused(name, as_meta(given), kind, "expected ")


@pytest.mark.parametrize("name", operators())
def test_wrong_dtype_and_device(name):
    for argument in tensor_arguments(name):
        given = call_with(name, argument)
        right = given[argument]
        others, text = [torch.int8], f"{argument}: expected dtype"
        if not right.is_floating_point():
            flags = argument == "has_initial_state"
            others = [torch.float32, torch.uint8, torch.int8, torch.int16] + [torch.bool] * (not flags)
            text += " bool, int32 or int64, got dtype" if flags else " int32 or int64, got dtype"
        if right.dtype == torch.int8:
            others, text = [torch.float32, torch.uint8, torch.int32], f"{argument}: expected dtype int8, got dtype"
        known = not right.is_floating_point() and right.dtype != torch.int8  # by their list of types
        for wrong in (*others, torch.complex64):
            given[argument] = right.to(wrong)
            assert_refused(name, given, TypeError, text if known else "expected dtype")
            assert_refused(name, as_meta(given), TypeError, text)
        if sum(isinstance(v, torch.Tensor) for v in given.values()) > 1:
            given[argument] = right.to("meta")
            assert_refused(name, given, ValueError, "expected device")


@pytest.mark.parametrize("name", operators())
def test_missing_tensor(name):
    for argument in overload(name)._schema.arguments:
        if str(argument.type) == "Tensor":
            given = {**call_with(name, argument.name), argument.name: None}
            assert_refused(name, given, ValueError, "tensor, got none")


@pytest.mark.parametrize("name", operators())
def test_wrong_python_type(name):
    for argument in overload(name)._schema.arguments:
        given = {**call_with(name, argument.name), argument.name: object()}
        with pytest.raises(TypeError, match=f"^{name.partition('.')[0]}: {argument.name}: expected type .*, got type"):
            form(name)(**given)


@pytest.mark.parametrize("name", [name for name in operators() if written(overload(name))])
def test_outputs_do_not_share_memory(name):
    """Every output with its first byte in the memory of every other tensor of every sample."""
    pairs = set()
    for base in calls(name):
        for target in set(written(overload(name))) & base.keys():
            for other in base.keys() - {target}:
                out, value = base[target], base[other]
                if not isinstance(value, torch.Tensor):
                    continue
                start = (value.nbytes - 1) // 8 * 8  # where a tensor of any type may start
                memory = torch.ones(value.nbytes + out.nbytes, dtype=torch.uint8)
                given = {**base, other: memory[: value.nbytes].view(value.dtype).view(value.shape).copy_(value)}
                given[target] = memory[start : start + out.nbytes].view(out.dtype).view(out.shape)
                assert_refused(name, given, ValueError, "expected memory of its own, got an overlap with")
                pairs.add((target, other))
    assert pairs


@pytest.mark.parametrize("name", [name for name in operators() if name.endswith(".out")])
def test_outputs_do_not_repeat_elements(name):
    for target in written(overload(name)):
        given = call_with(name, target)
        shape = given[target].shape
        given[target] = torch.ones((1,) * (len(shape) - 1) + shape[-1:], dtype=given[target].dtype).expand(shape)
        if len(shape) == 1:
            given[target] = torch.ones(1, dtype=given[target].dtype).expand(shape)
        assert_refused(name, given, ValueError, "expected")


def test_every_argument_has_a_row():
    assert {name.partition(".")[0] for name in operators()} == set(SAMPLES)
    covered = {(name, argument) for name, argument, *_ in EXPANDED}
    missing = [(n, a) for n in operators() for a in schema_arguments(n) if (n, a) not in covered]
    assert not missing, missing
    unknown = [row[:2] for row in ROWS if not any(row[1] == a for n, a, *_ in EXPANDED if n.startswith(row[0]))]
    assert not unknown, unknown


def test_every_tensor_has_a_contract():
    for name in operators():
        base = name.partition(".")[0]
        tensors = {a.name for a in overload(name)._schema.arguments if "Tensor" in str(a.type)}
        tensors |= {slot.name for slot in overload(name)._schema.returns if slot.name}
        assert tensors <= {item[0] for item in CONTRACTS.get(base, [])}, name

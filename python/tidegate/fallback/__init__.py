"""All operators in plain torch, for machines where the native library cannot run.

`install` defines the operators that the native library would have defined, with the same schemas. Everything above them
(fake kernels, autograd, the public functions) is the same code in both cases and does not know which of the two it has.
The fine stages of the chunked rule are left out: they exist to be timed and tested one by one.
"""

import torch

from tidegate import _contracts
from tidegate.fallback import checks, conv, packing, pool_ops, rows, rule, rule_ops
from tidegate.fallback.schemas import SCHEMAS

KERNELS = {
    name: getattr(module, name)
    for module, names in {
        conv: "causal_conv1d_fwd causal_conv1d_bwd causal_conv1d_update",
        rows: "gdn_gating_fwd gdn_gating_bwd l2norm_fwd l2norm_bwd rms_norm_gated_fwd rms_norm_gated_bwd rms_norm_fwd "
        "rms_norm_bwd partial_rope_fwd partial_rope_bwd mrope_cos_sin",
        packing: "seqlens",
        rule_ops: "chunk_gated_delta_rule_fwd chunk_gated_delta_rule_bwd recurrent_gated_delta_rule_fwd "
        "gdn_segment_map gdn_segment_combine",
        pool_ops: "chunk_gated_delta_rule_pool recurrent_gated_delta_rule gdn_packed_decode",
    }.items()
    for name in names.split()
}
IN_PLACE = {"partial_rope_fwd": ("x",), "partial_rope_bwd": ("dy",)}
SLOWER = "10 to 50 times slower than the native library, and with more memory"
_libraries = []  # torch forgets the operators of a library that nobody holds


def _missing(name):
    raise NotImplementedError(
        f"{name}: this operator needs the native library (see tidegate.report()). Experts, quantised weights and "
        "single stages of the chunked delta rule have no fallback; chunk_gated_delta_rule_fwd and its gradient have one"
    )


def _call(op, given, outputs):
    """Runs a kernel on arguments by name, and checks as the native library does."""
    name = op._schema.name.removeprefix("tidegate::")
    for argument in op._schema.arguments:
        if str(argument.type) == "Tensor" and given[argument.name] is None:
            checks.refuse(name, argument.name, "a tensor", "none")
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if name == "gdn_packed_decode":
        for size in ("HK", "HV", "K", "V"):
            if given[size] < 1:
                checks.refuse(name, size, ">= 1", given[size])
        if given["HV"] % given["HK"]:
            checks.refuse(name, "HV", f"a multiple of {given['HK']} (HK)", given["HV"])
    if name != "seqlens":  # it has better words for a wrong length
        _contracts.check(name, given)
    if name not in KERNELS:
        _missing(name)
    checks.memory(name, given, written, IN_PLACE.get(name, ()))
    inputs = {k: v for k, v in given.items() if k not in outputs}
    # The caller's autocast would reach the products in here; the native kernels do not see it.
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return KERNELS[name](**inputs)


def _defaults(op):
    """Defaults of arguments by name. A schema has a dtype as a number; the kernel's own default says the same."""
    return {a.name: a.default_value for a in op._schema.arguments if a.has_default_value() and a.name != "dtype"}


def _functional(op):
    names = [argument.name for argument in op._schema.arguments]
    defaults = _defaults(op)
    returns = [slot.name for slot in op._schema.returns]
    name = op._schema.name.removeprefix("tidegate::")

    def kernel(*args, **kwargs):
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        results = _call(op, given, ())
        values = results if isinstance(results, tuple) else (results,)
        made = {k: v for k, v in zip(returns, values, strict=True) if v.numel()}
        _contracts.check(name, given | made)  # an option may have asked for a type that a result cannot have
        if given.get("out_memory") != "swapped":  # otherwise strides are those that the fake kernels promise
            values = tuple(value.contiguous() for value in values)
        return values if isinstance(results, tuple) else values[0]

    return kernel


# What a functional form must be told so that it computes an output that the .out form was given.
ASKED = {"final_state": "output_final_state"}
TYPES = {"beta_dtype": "beta", "out_dtype": "y"}


def _out(op, functional):
    names = [argument.name for argument in op._schema.arguments]
    defaults = _defaults(op)
    returns = [slot.name for slot in functional._schema.returns]
    missing = {name: value for name, value in _defaults(functional).items() if name not in names}

    def kernel(*args, **kwargs):
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        extra = dict(missing)
        for option, output in TYPES.items():
            if option in missing and given.get(output) is not None:
                extra[option] = given[output].dtype
        for output, option in ASKED.items():
            if option in missing:
                extra[option] = given.get(output) is not None
        if "state_len" in missing and given["final_state"] is not None and given["final_state"].dim() == 3:
            extra["state_len"] = given["final_state"].shape[2]
        if "needs" in missing:
            extra["needs"] = sum(1 << i for i, name in enumerate(returns) if given[name] is not None)
        if given.get("snapshot_at") is not None and given["snapshots"] is None:
            text = f"a tensor (snapshot_at has {len(given['snapshot_at'])} entries)"
            checks.refuse(functional._schema.name.removeprefix("tidegate::"), "snapshots", text, "none")
        results = _call(op, given | extra, returns)
        values = results if isinstance(results, tuple) else (results,)
        for name, value in zip(returns, values, strict=True):
            if given.get(name) is not None:
                given[name].copy_(value)

    return kernel


def install(version):
    """Defines every operator of torch.ops.tidegate in this process."""
    lib = torch.library.Library("tidegate", "DEF")
    _libraries.append(lib)
    for schema in SCHEMAS:
        lib.define(schema)
    lib.impl("about", lambda: f"{version};fallback;fallback", "CompositeExplicitAutograd")
    lib.impl("chunk_size", lambda: rule.CHUNK, "CompositeExplicitAutograd")
    lib.impl("set_isa", _no_choice, "CompositeExplicitAutograd")
    for schema in SCHEMAS:
        name, _, overload = schema.partition("(")[0].partition(".")
        if name in ("about", "chunk_size", "set_isa"):
            continue
        packet = getattr(torch.ops.tidegate, name)
        if overload:
            lib.impl(f"{name}.out", _out(packet.out, packet.default), "CPU")
        else:
            key = "CompositeExplicitAutograd" if name == "seqlens" else "CPU"
            lib.impl(name, _functional(packet.default), key)


def _no_choice(name):
    if name != "fallback":
        raise ValueError(f"set_isa: expected one of fallback (no native library), got {name}")


def warning(cause, remedy):
    """The text that a user sees once."""
    affected = ", ".join(sorted({name.removesuffix("_fwd").removesuffix("_bwd") for name in KERNELS}))
    return (
        f"tidegate runs in plain torch: {cause}. Affected: all operators ({affected}); experts, quantised weights and "
        "the single stages of the chunked rule are missing. Results are the same within rounding, "
        f"{SLOWER}. Remedy: {remedy}"
    )

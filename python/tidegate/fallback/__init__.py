"""All operators in plain torch, for machines where the native library cannot run.

`install` defines the operators that the native library would have defined, with the same schemas. Everything above them
(fake kernels, autograd, the public functions) is the same code in both cases and does not know which of the two it has.
The fine stages of the chunked rule are left out: they exist to be timed and tested one by one.
"""

import torch

from tidegate import _contracts
from tidegate.fallback import checks, conv, experts, packing, pool_ops, products, quant, routing, rows, rule, rule_ops
from tidegate.fallback.schemas import SCHEMAS

KERNELS = {
    name: getattr(module, name)
    for module, names in {
        conv: "causal_conv1d_fwd causal_conv1d_bwd causal_conv1d_update",
        rows: "gdn_gating_fwd gdn_gating_bwd l2norm_fwd l2norm_bwd rms_norm_gated_fwd rms_norm_gated_bwd rms_norm_fwd "
        "rms_norm_bwd swiglu_fwd swiglu_bwd partial_rope_fwd partial_rope_bwd mrope_cos_sin",
        packing: "seqlens",
        rule_ops: "chunk_gated_delta_rule_fwd chunk_gated_delta_rule_bwd recurrent_gated_delta_rule_fwd "
        "gdn_segment_map gdn_segment_combine",
        pool_ops: "chunk_gated_delta_rule_pool recurrent_gated_delta_rule gdn_packed_decode",
        routing: "moe_route_fwd moe_route_bwd moe_init_routing moe_permute moe_unpermute_fwd moe_unpermute_bwd",
        products: "grouped_matmul_fwd grouped_matmul_bwd linear_fwd linear_bwd",
        experts: "moe_experts_fwd moe_experts_bwd",
        quant: "quantize grouped_matmul_quant grouped_matmul_swiglu_quant moe_experts_quant",
    }.items()
    for name in names.split()
}
# Checks with better words than a contract has; they come first.
FIRST = {
    "gdn_packed_decode": pool_ops.decode_sizes,
    "linear_fwd": products.linear_shapes,
    "linear_bwd": products.linear_shapes,
}
KEEPS_ORDER = ("grouped_matmul_bwd", "moe_experts_bwd", "quantize")  # results lie in memory as their inputs do
IN_PLACE = {"partial_rope_fwd": ("x",), "partial_rope_bwd": ("dy",)}
SLOWER = "10 to 50 times slower than the native library, and with more memory"
_libraries = []  # torch forgets the operators of a library that nobody holds


def _missing(name):
    raise NotImplementedError(
        f"{name}: this operator needs the native library (see tidegate.report()). Single stages of the chunked delta "
        "rule have no fallback; chunk_gated_delta_rule_fwd and its gradient have one"
    )


def _call(op, given, outputs):
    """Runs a kernel on arguments by name, and checks as the native library does."""
    name = op._schema.name.removeprefix("tidegate::")
    for argument in op._schema.arguments:
        if str(argument.type) == "Tensor" and given[argument.name] is None:
            checks.refuse(name, argument.name, "a tensor", "none")
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if name in FIRST:
        FIRST[name](name, **given)
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
    found = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    return {name: value for name, value in found.items() if value is None or not name.endswith("dtype")}


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
        # Strides are those that the fake kernels promise.
        if given.get("out_memory") != "swapped" and name not in KEEPS_ORDER:
            values = tuple(value.contiguous() for value in values)
        return values if isinstance(results, tuple) else values[0]

    return kernel


# What a functional form must be told so that it computes an output that the .out form was given.
ASKED = {"final_state": "output_final_state", "probs": "output_probs", "hidden": "save_hidden"}
TYPES = {"beta_dtype": "beta", "out_dtype": "y", "weights_dtype": "weights"}
SIZES = {"top_k": "weights", "num_experts": "counts"}  # the last dimension of that output
UNROUNDED = ("moe_unpermute_bwd", "grouped_matmul_bwd", "moe_experts_bwd")  # outputs may be wider than the inputs
BY_GROUPS = ("y", "dx", "q", "q_scale")  # rows outside all groups are left alone


def _write(name, output, value, given):
    if "groups" in given and name in BY_GROUPS:
        groups = given["groups"].tolist() or [0]
        rows = sum(groups) if given["group_list"] == "counts" else groups[-1]
        output, value = output[:rows], value[:rows]
    elif given.get("accumulate"):
        value = output.to(value.dtype) + value
    output.copy_(value)


def _out(op, functional):
    names = [argument.name for argument in op._schema.arguments]
    defaults = _defaults(op)
    returns = [slot.name for slot in functional._schema.returns]
    sizes = {a.name for a in functional._schema.arguments} & SIZES.keys()
    missing = {k: value for k, value in _defaults(functional).items() if k not in names}
    name = functional._schema.name.removeprefix("tidegate::")

    def kernel(*args, **kwargs):
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        extra = dict(missing)
        for size in sizes:
            output = given[SIZES[size]]
            extra[size] = 0 if output is None or output.dim() == 0 else output.shape[-1]
        if name in UNROUNDED:
            extra["rounded"] = False
        for option, output in TYPES.items():
            if option in missing and given.get(output) is not None:
                extra[option] = given[output].dtype
        for output, option in ASKED.items():
            if option in missing:
                extra[option] = given.get(output) is not None
        if "state_len" in missing and given["final_state"] is not None and given["final_state"].dim() == 3:
            extra["state_len"] = given["final_state"].shape[2]
        if "needs" in missing:
            extra["needs"] = sum(1 << i for i, output in enumerate(returns) if given[output] is not None)
        if given.get("snapshot_at") is not None and given["snapshots"] is None:
            text = f"a tensor (snapshot_at has {len(given['snapshot_at'])} entries)"
            checks.refuse(name, "snapshots", text, "none")
        results = _call(op, given | extra, returns)
        values = results if isinstance(results, tuple) else (results,)
        for output, value in zip(returns, values, strict=True):
            if given.get(output) is not None:
                _write(output, given[output], value, given)

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
        f"tidegate runs in plain torch: {cause}. Affected: all operators ({affected}); the single stages of the "
        f"chunked rule are missing. Results are the same within rounding, {SLOWER}. Remedy: {remedy}"
    )

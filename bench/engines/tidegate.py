"""Tidegate through torch.ops.tidegate, the functional forms: it allocates its results as the peers do.

More rows where they say something: "out" writes into memory that exists already, "fp32" rounds once where the default
repeats Transformers' roundings.
"""

import torch

from engines import Absent, Run
from engines.delta_rule import forward_backward
from engines.experts import made, sampled

PACKAGES = {"tidegate": None}
LACKS: dict[str, str] = {}


def load(threads):
    import tidegate

    tidegate.isa()  # raises when the native library did not load
    torch.set_num_threads(threads)


def about():
    import tidegate

    return f"isa {tidegate.isa()}"


def _op(name):
    try:
        return getattr(torch.ops.tidegate, name)
    except AttributeError:
        raise Absent("not in this version") from None


def _entry(name, arguments, names, shape=None, **fixed):
    """Rows of a functional operator. arguments(x) -> positional ones; names: results in the operator's order, "" = not
    compared. shape(x, result) brings a result into the reference's layout."""

    def outputs(x, results):
        results = results if isinstance(results, (tuple, list)) else (results,)
        return {n: shape(x, r) if shape else r for n, r in zip(names, results, strict=False) if n}

    def plain(item, x, **more):
        op, args = _op(name), arguments(x)
        return Run(lambda: op(*args, **fixed, **more), lambda r: outputs(x, r), more.get("rounding", ""))

    def into(item, x):
        op, args = _op(name), arguments(x)
        if "out" not in op.overloads():
            raise Absent("no out form in this version")
        written = [a.name for a in op.out._schema.arguments if a.is_out]
        first = op(*args, **fixed)
        first = first if isinstance(first, (tuple, list)) else (first,)
        # An optional result that was not asked for comes back without elements; the out form leaves it out.
        out = {n: r for n, r in zip(written, first, strict=True) if r.numel()}

        def call():
            op.out(*args, **fixed, **out)
            return tuple(out.values())

        return Run(call, lambda r: outputs(x, r), "into existing memory")

    return {"": plain, "out": into}, plain


def _once(rows, plain):
    return rows | {"fp32": lambda item, x: plain(item, x, rounding="fp32")}


def _conv_update(contiguous):
    def build(item, x):
        op, rows = _op("causal_conv1d_update"), x["x"][:, None]
        state = x["state"].clone() if contiguous else x["state"].transpose(1, 2).contiguous().transpose(1, 2)
        note = f"state stored as {'[B,D,3]' if contiguous else '[B,3,D]'}"
        return Run(
            lambda: op(rows, state, x["w"], None, activation="silu", layout="BSND"),
            lambda y: {"y": y[:, 0], "state": state},
            note,
        )

    return build


def _rope_in_place(item, x):
    op, rows = _op("partial_rope_fwd").out, x["x"].clone()

    def call():
        op(rows, x["cos"], x["sin"], y=rows)
        return rows

    return Run(call, lambda y: {"y": y.clone()}, "in place")


def _prefill(precision, into=False):
    def build(item, x):
        op = _op("chunk_gated_delta_rule_fwd")
        packed = "lengths" in item.sizes
        args = [x[n] for n in ("q", "k", "v", "g", "beta")]
        more = dict(precision=precision, cu_seqlens=torch.tensor(item.cu, dtype=torch.int32) if packed else None)
        note = f"precision {precision}"
        if not into:
            return Run(lambda: op(*args, output_final_state=True, **more), lambda r: {"o": r[0], "S": r[1]}, note)
        o, S = torch.empty_like(x["v"]), torch.empty(len(item.lengths), item.sizes["HV"], 128, 128)

        def call():
            op.out(*args, **more, o=o, final_state=S)
            return o, S

        return Run(call, lambda r: {"o": r[0], "S": r[1]}, note + ", into existing memory")

    return build


def _train(item, x):
    import tidegate

    return forward_backward(item, x, lambda *args: tidegate.chunk_gated_delta_rule(*args)[0], grouped=True)


def _decode(v_first=False, into=False):
    """Through the Python function, with the gates formed inside as the peers do."""

    def build(item, x):
        import tidegate

        q, k, v, a, b = (x[n][:, 0] for n in ("q", "k", "v", "a", "b"))
        pool = x["state"].transpose(-1, -2).contiguous() if v_first else x["state"].clone()
        slots = torch.arange(item.sizes["B"], dtype=torch.int32)
        more = dict(A_log=x["A_log"], dt_bias=x["dt_bias"], beta_sigmoid=True, state_v_first=v_first)
        more |= dict(out=torch.empty_like(v)) if into else {}
        step = tidegate.recurrent_gated_delta_rule

        def outputs(o):
            return {"o": o[:, None], "S": pool.transpose(-1, -2) if v_first else pool}

        note = "gates from a, b inside" + (", into existing memory" if into else "") + (", V-first" if v_first else "")
        return Run(lambda: step(q, k, v, a, b, pool, state_indices=slots, **more), outputs, note)

    return build


def _layer(item, x):
    import tidegate

    conv, pool = x["conv"].transpose(1, 2).contiguous().transpose(1, 2), x["state"].clone()
    args = [x[n] for n in ("mixed", "z", "a", "b")], [x["w"], None, x["A_log"], x["dt_bias"]]
    more = dict(state_indices=torch.arange(item.sizes["B"]), out=torch.empty_like(x["z"]))
    more |= dict(HK=item.sizes["HK"], HV=item.sizes["HV"], K=128, V=128)
    step = tidegate.gdn_packed_decode

    def call():
        return step(*args[0], conv, *args[1], pool, x["norm"], **more)

    return Run(call, lambda y: {"y": y, "S": pool}, "one call")


def _layer_separate(item, x):
    import tidegate

    ops, B, HK, HV = tidegate.ops, item.sizes["B"], item.sizes["HK"], item.sizes["HV"]
    conv, pool = x["conv"].transpose(1, 2).contiguous().transpose(1, 2), x["state"].clone()
    slots, z = torch.arange(B), x["z"].view(B, HV, 128)
    heads = [HK * 128, HK * 128, HV * 128]

    def call():
        y = ops.causal_conv1d_update(x["mixed"][:, None], conv, x["w"], activation="silu", layout="BSND")[:, 0]
        q, k, v = (t.view(B, -1, 128) for t in y.split(heads, 1))
        g, beta = ops.gdn_gating_fwd(x["a"], x["b"], x["A_log"], x["dt_bias"], layout="TND")
        o = tidegate.recurrent_gated_delta_rule(q, k, v, g, beta, pool, state_indices=slots, use_qk_l2norm=True)
        return ops.rms_norm_gated_fwd(o, z, x["norm"])[0].flatten(1)

    return Run(call, lambda y: {"y": y, "S": pool}, "four operators")


def _experts(form):
    """Weights as the model stores them [E,N,K], a transposed view of them, transposed in memory, or in int8."""

    def build(item, x):
        import tidegate

        pair, note, axes = [x["gate_up"], x["down"]], "weights as stored", "nk"
        if form == "int8":
            pair = made(x, "int8", lambda: [t for w in pair for t in tidegate.quantize(w)])
            args = [x["x"], x["ids"], x["weights"], *pair]
            return Run(lambda: tidegate.moe_experts_quant(*args), lambda y: {"y": y}, "half the bytes")
        if form:
            pair, note, axes = [w.mT for w in pair], "transposed view", "kn"
        if form == "[E,K,N]":
            pair, note = made(x, "turned", lambda: [w.contiguous() for w in pair]), "transposed in memory"
        args = [x["x"], x["ids"], x["weights"], *pair]
        return Run(lambda: tidegate.moe_experts(*args, weight_axes=axes), lambda y: {"y": y}, note)

    return build


def _experts_bwd(needs, kept=True):
    def build(item, x):
        op, args = _op("moe_experts_bwd"), [x[n] for n in ("dout", "x", "ids", "weights", "gate_up", "down")]
        names = [n for i, n in enumerate(("dx", "dw", "dgate_up", "ddown")) if needs >> i & 1]
        note = "saved gate and up, forward not timed" if kept else "gate and up computed again"
        note += "" if needs == 15 else ", frozen weights"
        hidden = _op("moe_experts_fwd")(*args[1:], save_hidden=True)[1] if kept else None

        def call():
            return op(*args, hidden=hidden, needs=needs)

        return Run(call, lambda r: sampled(dict(zip(names, r, strict=False))), note)

    return build


_conv, _ = _entry("causal_conv1d_fwd", lambda x: (x["x"][None], x["w"]), ["y"], lambda x, r: r[0], activation="silu")
_conv_bwd, _ = _entry(
    "causal_conv1d_bwd",
    lambda x: (x["dy"][None], x["x"][None], x["w"]),
    ["dx", "dw"],
    lambda x, r: r.reshape(x["w"].shape if r.shape[-1] == x["w"].shape[-1] else x["x"].shape),
    activation="silu",
)
_gating, _ = _entry("gdn_gating_fwd", lambda x: (x["a"], x["b"], x["A_log"], x["dt_bias"]), ["g", "beta"])
_l2norm, _ = _entry("l2norm_fwd", lambda x: (x["x"],), ["y"])
_rms, _ = _entry("rms_norm_fwd", lambda x: (x["x"], x["w"]), ["y"], eps=1e-6)

ENTRIES = {
    "conv": _conv,
    "conv_bwd": _conv_bwd,
    "conv_update": {"": _conv_update(contiguous=False), "[B,D,3]": _conv_update(contiguous=True)},
    "decode": {"": _decode(), "out": _decode(into=True), "V-first": _decode(v_first=True)},
    "experts": {name: _experts(name) for name in ("", "view", "[E,K,N]", "int8")},
    "experts_bwd": {"": _experts_bwd(15), "recomputed": _experts_bwd(15, kept=False), "frozen": _experts_bwd(3)},
    "gating": _gating,
    "layer_step": {"": _layer, "separate": _layer_separate},
    "l2norm": _l2norm,
    "prefill": {"": _prefill("fp32"), "out": _prefill("fp32", into=True), "bf16": _prefill("bf16")},
    "rms_norm": _rms,
    "train": {"": _train},
    "norm_gated": _once(*_entry("rms_norm_gated_fwd", lambda x: (x["x"], x["z"], x["w"]), ["y"])),
    "rope": _once(*_entry("partial_rope_fwd", lambda x: (x["x"], x["cos"], x["sin"]), ["y"]))
    | {"in place": _rope_in_place},
}

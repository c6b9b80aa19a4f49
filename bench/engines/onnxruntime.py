"""onnxruntime's contributed operators: fp32 only, results from its own arena (it never pays for fresh pages)."""

import numpy
import torch

from engines import Run
from engines.delta_rule import repeated

PACKAGES = {"onnxruntime": "1.31", "onnx": None}
LACKS = {kind: "no backward" for kind in ("train", "conv_bwd", "experts_bwd")}
LACKS["experts"] = "not compared"
_NOTE = "fp32, own arena"
_threads = 1


def load(threads):
    global _threads
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401

    _threads = threads


def _session(operator, inputs, outputs, **attributes):
    import onnx
    import onnxruntime

    def value(name):
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)

    named = [n for n in inputs if n]
    node = onnx.helper.make_node(operator, inputs, outputs, domain="com.microsoft", **attributes)
    graph = onnx.helper.make_graph([node], "item", [value(n) for n in named], [value(n) for n in outputs])
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 10
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _threads
    # Workers stop spinning when a run ends; otherwise they would burn the cores of the next engine in the turn.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _array(t):
    return numpy.ascontiguousarray(t.float().numpy())


def _rule(item, x, state, note=_NOTE):
    """LinearAttention has no packed form: one call for each sequence of a packed item."""
    HV = item.sizes["HV"]
    names = ["q", "k", "v", "past", "g", "beta"]
    heads = dict(q_num_heads=HV, kv_num_heads=HV, update_rule="gated_delta", scale=0.0, chunk_size=64)
    session = _session("LinearAttention", names, ["o", "present"], **heads)
    q, k = repeated(x, HV)
    tensors = dict(q=q.flatten(2), k=k.flatten(2), v=x["v"].flatten(2), g=x["g"], beta=x["beta"])
    spans = item.spans if "lengths" in item.sizes else [(0, x["v"].shape[1])]
    feeds = [{n: _array(t[:, b:e]) for n, t in tensors.items()} | {"past": _array(state)} for b, e in spans]

    def outputs(results):
        o, s = ([torch.from_numpy(r[i]) for r in results] for i in (0, 1))
        return {"o": torch.cat(o, 1).view(x["v"].shape), "S": torch.cat(s)}

    return Run(lambda: [session.run(None, feed) for feed in feeds], outputs, note)


def _prefill(item, x):
    rows = 1 if "lengths" in item.sizes else item.sizes["B"]
    return _rule(item, x, torch.zeros(rows, item.sizes["HV"], x["q"].shape[-1], x["v"].shape[-1]))


def _decode(item, x):
    return _rule(item, x, x["state"], _NOTE + "; state copied")


def _convolution(x, past, w):
    session = _session("CausalConvWithState", ["x", "w", "", "past"], ["y", "present"], activation="silu")
    feed = {"x": _array(x), "w": _array(w[:, None]), "past": _array(past)}
    return lambda: [torch.from_numpy(r) for r in session.run(None, feed)]


def _conv(item, x):
    D, W = item.sizes["D"], item.sizes["W"]
    call = _convolution(x["x"].T[None], torch.zeros(1, D, W - 1), x["w"])
    return Run(call, lambda r: {"y": r[0][0].T}, _NOTE + ", channel-major input")


def _conv_update(item, x):
    call = _convolution(x["x"][:, :, None], x["state"], x["w"])
    return Run(call, lambda r: {"y": r[0][..., 0], "state": r[1]}, _NOTE + "; state not in place")


ENTRIES = {
    "prefill": {"": _prefill},
    "decode": {"": _decode},
    "conv": {"": _conv},
    "conv_update": {"": _conv_update},
}

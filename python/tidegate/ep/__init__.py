"""Expert parallelism: tokens go to the processes that hold their experts, and the experts' results come back.

    buffer = tidegate.ep.Buffer(group, experts=256, slots=8, row_bytes=2 * 2048, max_tokens=4096)
    out = tidegate.ep.experts(buffer, x, ids, weights, gate_up, down)      # the layer, with all gradients

or in parts, around experts of one's own:

    rows, handle = tidegate.ep.dispatch(buffer, x, ids, weights)
    y = my_experts(rows, handle.expert_rows)
    out = tidegate.ep.combine(buffer, y, handle)

For Transformers models: `tidegate.ep.register()` before the model is built with an expert-parallel plan.
"""

from tidegate.ep.buffer import Buffer, Handle, node_id
from tidegate.ep.functions import combine, dispatch, experts
from tidegate.ep.nodes import NodesBuffer
from tidegate.ep.npu import npu_moe_distribute_combine_v2, npu_moe_distribute_dispatch_v2
from tidegate.ep.style import ep_enabled, parallelize, register, unregister

__all__ = [
    "Buffer",
    "Handle",
    "NodesBuffer",
    "combine",
    "dispatch",
    "ep_enabled",
    "experts",
    "node_id",
    "npu_moe_distribute_combine_v2",
    "npu_moe_distribute_dispatch_v2",
    "parallelize",
    "register",
    "unregister",
]

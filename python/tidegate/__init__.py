"""Tidegate: the operators of gated-delta + MoE models (Qwen3-Next, Qwen3.5, Qwen3.6 and relatives), fast on CPUs."""

import importlib

from tidegate import _interrupt  # noqa: F401
from tidegate._native import __version__, isa, ops, set_isa
from tidegate.check import check, check_isolation
from tidegate.decode import gdn_packed_decode
from tidegate.delta_rule import chunk_gated_delta_rule, chunk_gdn, chunk_size
from tidegate.linear import linear
from tidegate.moe import grouped_matmul, moe_experts, moe_route
from tidegate.norm import RMSNormGated, rms_norm, rms_norm_gated
from tidegate.options import PatchOptions
from tidegate.packed import pack
from tidegate.patch import PatchHandle, kernelize_model, patch, unpatch
from tidegate.quant import (
    grouped_matmul_quant,
    grouped_matmul_swiglu_quant,
    moe_experts_quant,
    npu_grouped_matmul_swiglu_quant,
    quantize,
    quantize_experts,
)
from tidegate.recorder import RouterRecorder
from tidegate.recurrent import fused_recurrent_gated_delta_rule, fused_recurrent_gdn, recurrent_gated_delta_rule
from tidegate.registration import register, unregister
from tidegate.report import report
from tidegate.rope import partial_rope
from tidegate.state import Sequence, Snapshot, StatePool, load_snapshots, save_snapshots
from tidegate.swiglu import swiglu
from tidegate.weight_cache import invalidate

__all__ = [
    "PatchHandle",
    "PatchOptions",
    "RMSNormGated",
    "RouterRecorder",
    "Sequence",
    "Snapshot",
    "StatePool",
    "__version__",
    "check",
    "check_isolation",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_size",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "gdn_packed_decode",
    "grouped_matmul",
    "grouped_matmul_quant",
    "grouped_matmul_swiglu_quant",
    "invalidate",
    "isa",
    "kernelize_model",
    "linear",
    "load_snapshots",
    "moe_experts",
    "moe_experts_quant",
    "moe_route",
    "npu_grouped_matmul_swiglu_quant",
    "ops",
    "pack",
    "partial_rope",
    "patch",
    "quantize",
    "quantize_experts",
    "recurrent_gated_delta_rule",
    "register",
    "report",
    "rms_norm",
    "rms_norm_gated",
    "save_snapshots",
    "set_isa",
    "swiglu",
    "unpatch",
    "unregister",
]


def __getattr__(name):
    if name in ("ep", "parallel"):  # imported when they are used: torch.distributed takes its time
        return importlib.import_module(f"tidegate.{name}")
    raise AttributeError(f"module 'tidegate' has no attribute {name!r}")

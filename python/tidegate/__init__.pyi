# Types of the public functions; docstrings are with the functions. tests/test_docs.py compares names and defaults.
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tidegate.check.table import Report as CheckReport
from tidegate.options import PatchOptions as PatchOptions
from tidegate.patch.handle import PatchHandle as PatchHandle
from tidegate.patch.handle import PatchReport
from tidegate.registration import Registration
from tidegate.report import Report
from tidegate.state import Sequence as Sequence
from tidegate.state import Snapshot as Snapshot
from tidegate.state import StatePool as StatePool

__version__: str
ops: Any

_Axes = Literal["nk", "kn"]
_Groups = Literal["counts", "cumsum"]
_Ids = Literal["plain", "transformers_ep"]

class RMSNormGated(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-06,
        activation: str = "silu",
        fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None: ...
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor: ...

def isa() -> str: ...
def set_isa(name: str) -> None: ...
def chunk_size() -> int: ...
def report(model: nn.Module | None = None) -> Report | PatchReport: ...
def check(model: nn.Module, *, seed: int = 0, show: bool = True) -> CheckReport: ...
def check_isolation(
    model: nn.Module,
    lengths: Items[int] = (5, 1, 64, 0, 70),
    seed: int = 0,
    *,
    tolerance: float = 0.0,
    inputs: Items[str] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> CheckReport: ...
def patch(
    model: nn.Module | None = None,
    ops: str | Iterable[str] = "all",
    options: PatchOptions | Mapping[str, Any] | None = None,
    strict: bool = True,
    check: str = "install",
    padding_free: bool | None = None,
    scope: str = "model",
    replace: bool = False,
) -> PatchHandle: ...
def unpatch(model: nn.Module | None = None) -> bool: ...
def kernelize_model(model: nn.Module, mode: Any = None, device: Any = None, use_fallback: bool = True) -> nn.Module: ...
def register() -> Registration: ...
def unregister() -> Any: ...
def pack(
    samples: Iterable[Mapping[str, Any] | Tensor | Items[int]],
    *,
    ignore_index: int = -100,
    max_tokens: int | None = None,
) -> dict[str, Any]: ...
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]: ...

chunk_gdn = chunk_gated_delta_rule

def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]: ...

fused_recurrent_gdn = fused_recurrent_gated_delta_rule

def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    state_indices: Tensor,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor: ...
def gdn_packed_decode(
    mixed: Tensor,
    z: Tensor | None,
    a: Tensor | None,
    b: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor | None,
    state: Tensor,
    norm_weight: Tensor,
    *,
    state_indices: Tensor,
    HK: int,
    HV: int,
    K: int,
    V: int,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor: ...
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-06) -> Tensor: ...
def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-06,
    activation: str = "silu",
    rounding: Literal["hf", "fp32"] = "hf",
) -> Tensor: ...
def partial_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str = "BNSD", rounding: Literal["hf", "fp32"] = "hf"
) -> tuple[Tensor, Tensor]: ...
def swiglu(gate: Tensor, up: Tensor) -> Tensor: ...
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...
def quantize(x: Tensor, axis: int = -1) -> tuple[Tensor, Tensor]: ...
def load_snapshots(path: str | PathLike[str]) -> list[Snapshot]: ...
def save_snapshots(path: str | PathLike[str], snapshots: Iterable[Snapshot]) -> None: ...

# The rest (experts, int8, parallelism) has no types yet.
def __getattr__(name: str) -> Any: ...

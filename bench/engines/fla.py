"""flash-linear-attention's plain torch functions: its Triton kernels do not run on a CPU.

The one file they are in is loaded by path, because importing the package pulls in every layer, model and Triton.
"""

import importlib.util
import os

import torch

from engines import Absent, Run
from engines.delta_rule import forward_backward, per_sequence, repeated

PACKAGES = {"fla-core": "0.6.0", "einops": None}
_TRITON = "Triton only, does not run on a CPU"
LACKS = {
    kind: _TRITON for kind in ("conv", "conv_bwd", "conv_update", "norm_gated", "l2norm", "rms_norm", "gating", "rope")
}
_naive = None


def load(threads):
    global _naive
    folder = importlib.util.find_spec("fla").submodule_search_locations[0]
    path = os.path.join(folder, "ops", "gated_delta_rule", "naive.py")
    if not os.path.exists(path):
        raise Absent("fla-core has no ops/gated_delta_rule/naive.py")
    spec = importlib.util.spec_from_file_location("fla_naive", path)
    _naive = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_naive)
    torch.set_num_threads(threads)


def _chunk(q, k, v, g, beta):
    return _naive.naive_chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)


def _prefill(item, x):
    return per_sequence(item, x, _chunk, "fp32 output")


def _decode(item, x):
    q, k = repeated(x, item.sizes["HV"])

    def call():
        return _naive.naive_recurrent_gated_delta_rule(
            q, k, x["v"], x["beta"], x["g"], initial_state=x["state"], output_final_state=True
        )

    return Run(call, lambda r: {"o": r[0], "S": r[1]}, "fp32 output, state not in place")


def _train(item, x):
    return forward_backward(item, x, lambda *inputs: _chunk(*inputs)[0])


ENTRIES = {"prefill": {"": _prefill}, "decode": {"": _decode}, "train": {"": _train}}

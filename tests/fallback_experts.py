"""Grouped products that add to what is there, and NaNs that stay in their rows. Run with and without the library."""

import torch

import tidegate
from tidegate import ops

torch.manual_seed(0)
d, x = torch.randn(7, 4).bfloat16(), torch.randn(7, 6).bfloat16()
w, counts = torch.randn(3, 4, 6).bfloat16(), torch.tensor([2, 0, 3])
part = [d[a:b].float().T @ x[a:b].float() for a, b in ((0, 2), (2, 2), (2, 5))]
start, dx, dbias = torch.randn(3, 4, 6), torch.full((7, 6), 9.0).bfloat16(), torch.ones(3, 4)
dweight = start.clone()
ops.grouped_matmul_bwd.out(d, x, w, counts, accumulate=True, dx=dx, dweight=dweight, dbias=dbias)
assert torch.allclose(dweight, start + torch.stack(part), rtol=0, atol=1e-5)  # not through bf16
assert torch.equal(dweight[1], start[1]) and (dx[5:] == 9).all() and (dx[:5] != 9).all()
assert torch.allclose(dbias[0], 1 + d[:2].float().sum(0), atol=1e-6)
x = torch.randn(3, 8)
x[1, 2] = float("nan")
ids, weights = torch.tensor([[0, 2], [1, -1], [-1, -1]]), torch.rand(3, 2)
weights[2] = float("nan")  # of nobody
gate_up, down = torch.randn(3, 10, 8), torch.randn(3, 8, 5)
out = tidegate.moe_experts(x, ids, weights, gate_up, down)
assert not out[0].isnan().any() and out[1].isnan().all() and not out[2].any()
quantised = [t for w in (gate_up, down) for t in tidegate.quantize(w)]
out = tidegate.moe_experts_quant(x, ids, weights, *quantised)
assert not out[0].isnan().any() and out[1].isnan().all() and not out[2].any()
print("experts done")

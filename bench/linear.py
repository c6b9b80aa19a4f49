#!/usr/bin/env python3
"""tidegate.linear beside torch's product, by shape and number of rows: what the patch layer's choice rests on.

python bench/linear.py
"""

import argparse

import torch

import tidegate
from prefill import medians, table

SHAPES = ((1024, 3584), (3584, 1024), (1024, 6144), (2048, 8192), (4096, 2048), (1024, 32))
COLD = 256 << 20  # bytes of weights that calls rotate through: none of them is still in a cache


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,2,4,8,16,64,1024", help="rows of x, default %(default)s")
    parser.add_argument("--reps", type=int, default=5, help="repetitions, default %(default)s")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for K, N in SHAPES:
        count = max(2, min(64, COLD // (2 * K * N)))
        weights = [torch.randn(N, K).bfloat16() for _ in range(count)]
        for M in map(int, args.rows.split(",")):
            x = torch.randn(M, K).bfloat16()

            def calls(product, x=x, weights=weights):
                def run():
                    with torch.inference_mode():
                        for weight in weights:
                            product(x, weight)

                return run

            products = {"torch": torch.nn.functional.linear, "tidegate": tidegate.linear}
            theirs, ours = medians({name: calls(f) for name, f in products.items()}, args.reps).values()
            read = 2 * K * N * count
            rows.append(
                [f"[{N}, {K}]", f"{M}", f"{ours / count * 1e6:.0f} us", f"{read / ours / 1e9:.1f} GB/s"]
                + [f"{2 * M * K * N * count / ours / 1e9:.0f} GFLOP/s", f"{theirs / ours:.2f}x"]
            )
    title = f"bf16, {args.threads} threads, isa {tidegate.isa()}; the last column is torch's time over ours"
    table(title, ["weight", "rows", "Tidegate", "of the weight", "", "torch"], rows)


if __name__ == "__main__":
    main()

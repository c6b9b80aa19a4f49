"""Dispatch + combine beside MPI_Alltoallv (C++) and beside Transformers' all_to_all over gloo (Python).

    python bench/ep/run.py --program build-bench/bench/tidegate_ep_bench [--ranks 2 4 8] [--tokens 32 1024]

H=7168, top-8 of 256 experts, bf16, identity experts. Times are medians of the slowest rank, in ms; each peer runs
turn by turn with Tidegate in the same processes. Without MPI (no program given) only the second comparison runs.
Lines "in place" are the form without expansion, in which experts read the rows in the senders' windows
(tidegate.ep.experts without gradients): dispatch up to the row pointers, and combine of results that the experts left
in the window. The largest ratios of both forms are printed beside the promised ones.
"""

import argparse
import datetime
import json
import mmap
import os
import platform
import statistics
import subprocess
import tempfile
import time
import types

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tidegate

HIDDEN, SLOTS, EXPERTS = 7168, 8, 256
MOST_RATIO = {"mpi": 0.30, "gloo": 0.05}  # what the project promises of every cell


class Barrier:
    """Ranks begin together, also where they share cores, and those that are done leave the cores to the others. Gloo's
    barrier lets four ranks on two cores go 0.4 ms apart and eight 0.9 ms: time of whoever then waits for a rank."""

    def __init__(self, path, rank, ranks):
        with open(path, "a+b") as file:
            file.truncate(8 * ranks)
            self.here = memoryview(mmap.mmap(file.fileno(), 8 * ranks)).cast("q")
        self.rank, self.times = rank, 0
        self.shared = ranks > len(os.sched_getaffinity(0))

    def wait(self, sleep=False):
        self.times += 1
        self.here[self.rank] = self.times
        while min(self.here) < self.times:
            time.sleep(1e-3) if sleep else os.sched_yield()

    def begin(self):
        self.wait()

    def end(self):
        self.wait(sleep=self.shared)


def make(rank, tokens):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(SLOTS).indices
    return x, ids, torch.full((tokens, SLOTS), 1 / SLOTS)


def stock_exchange(ranks):
    """(dispatch, combine) of Transformers, without its experts: dispatch(x, ids, weights) -> rows, state."""
    from transformers.distributed import expert_parallel

    local = EXPERTS // ranks
    if hasattr(expert_parallel, "AllToAllEP"):  # 5.23 and later
        mesh = dist.device_mesh.init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ep", "tp"))
        experts = types.SimpleNamespace(forward=None, num_experts=local)
        exchange = expert_parallel.AllToAllEP(experts, mesh["ep"], mesh["tp"])

        def dispatch(x, ids, weights):
            rows, _, _, state = exchange._dispatch_tokens(x, ids, weights)
            return rows, state

        return dispatch, exchange._combine_tokens
    style = expert_parallel.EpDispatchExpertsParallel()

    def dispatch(x, ids, weights):
        rows, _, *state = style._dispatch_tokens(x, ids, local, dist.group.WORLD, ranks)
        dist._functional_collectives.wait_tensor(rows)
        return rows, (weights, *state)

    return dispatch, lambda rows, state: style._combine_tokens(rows, *state, dist.group.WORLD)


def through_gloo(exchange, x, ids, weights):
    dispatch, combine = exchange
    begin = time.perf_counter()
    rows, state = dispatch(x, ids, weights)
    middle = time.perf_counter()
    out = combine(rows, state).to(x.dtype)
    return out, (middle - begin, time.perf_counter() - middle)


def through_tidegate(buffer, x, ids, weights):
    begin = time.perf_counter()
    handle = buffer.dispatch(x, ids, weights)
    rows = buffer.expand(handle, out=buffer.window(handle.rows, HIDDEN, x.dtype))
    middle = time.perf_counter()
    out, _ = buffer.combine(rows, handle)
    return out, (middle - begin, time.perf_counter() - middle)


def in_place(barrier, buffer, x, ids, weights):
    """The same without expansion: the copy stands for experts that read the senders' rows and write the window."""
    begin = time.perf_counter()
    handle = buffer.dispatch(x, ids, weights)
    dispatched = time.perf_counter() - begin
    barrier.end()
    rows = buffer.expand(handle, out=buffer.window(handle.rows, HIDDEN, x.dtype))
    barrier.begin()
    begin = time.perf_counter()
    out, _ = buffer.combine(rows, handle)
    return out, (dispatched, time.perf_counter() - begin)


def slowest(times):
    worst = torch.tensor([*times, sum(times)], dtype=torch.float64) * 1e3
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.tolist()


@torch.no_grad()
def rank_main(rank, ranks, tokens, rounds, folder):
    torch.set_num_threads(1)  # a rank is a core
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timeout)
    x, ids, weights = make(rank, tokens)
    buffer = tidegate.ep.Buffer(
        experts=EXPERTS, slots=SLOTS, row_bytes=2 * HIDDEN, max_tokens=tokens, timeout=300.0, name="bench"
    )
    exchange = stock_exchange(ranks)
    barrier = Barrier(f"{folder}/barrier", rank, ranks)
    runs = {
        "gloo": lambda: through_gloo(exchange, x, ids, weights),
        "tidegate": lambda: through_tidegate(buffer, x, ids, weights),
        "in_place": lambda: in_place(barrier, buffer, x, ids, weights),
    }
    found = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name in runs:
            barrier.begin()
            out, times = runs[name]()
            barrier.end()
            times = slowest(times)
            assert torch.allclose(out.float(), x.float(), rtol=2e-2, atol=2e-2)  # identity experts, weights sum to 1
            if i > 0:  # the first round touches all memory
                found[name].append(times)
    if rank == 0:
        medians = {name: [statistics.median(c) for c in zip(*times, strict=True)] for name, times in found.items()}
        with open(f"{folder}/found", "w") as file:
            json.dump(medians, file)
    dist.barrier()
    dist.destroy_process_group()


def python_times(ranks, tokens):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (ranks, tokens, 20 if tokens <= 64 else 3, folder), nprocs=ranks)
        with open(f"{folder}/found") as file:
            return json.load(file)


def mpi_times(program, ranks, tokens):
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), program, str(tokens)]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="tidegate_ep_bench, to compare with MPI")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 1024])
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.processor() or platform.machine()}, {cores} cores shared by all ranks, torch {torch.__version__}")
    print(
        "ranks tokens | dispatch  combine    total |      MPI  ratio | from Python     gloo  ratio | MB a rank, "
        "of all_to_all"
    )
    rows = []
    for tokens in options.tokens:
        for ranks in options.ranks:
            row = {"ranks": ranks, "tokens": tokens, "cores": cores}
            if options.program:
                row |= mpi_times(options.program, ranks, tokens)
                row["mpi_ratio"] = row["total"] / row["mpi"]
            found = python_times(ranks, tokens)
            row |= {"python": found["tidegate"][2], "gloo": found["gloo"][2], "python_in_place": found["in_place"][2]}
            row["gloo_ratio"] = row["python"] / row["gloo"]
            whole = 2 * tokens * SLOTS * HIDDEN * 2 * (ranks - 1) / ranks  # rows that leave a rank, there and back
            native = (
                f"{row['dispatch']:8.3f} {row['combine']:8.3f} {row['total']:8.3f}" if options.program else " " * 26
            )
            mpi = f"{row['mpi']:8.3f} {row['mpi_ratio']:6.3f}" if options.program else " " * 15
            share = f"{row['bytes'] / 1e6:.1f}, {row['bytes'] / whole:.0%}" if options.program else ""
            print(
                f"{ranks:5} {tokens:6} | {native} | {mpi} | {row['python']:11.3f} {row['gloo']:8.1f} "
                f"{row['gloo_ratio']:6.4f} | {share}",
                flush=True,
            )
            row["in_place_gloo_ratio"] = row["python_in_place"] / row["gloo"]
            if options.program:
                row["in_place_mpi_ratio"] = row["in_place"] / row["mpi"]
                native = f"{row['in_place_dispatch']:8.3f} {row['in_place_combine']:8.3f} {row['in_place']:8.3f}"
                mpi = f"{row['mpi']:8.3f} {row['in_place_mpi_ratio']:6.3f}"
            print(
                f"    in place | {native} | {mpi} | {row['python_in_place']:11.3f} {row['gloo']:8.1f} "
                f"{row['in_place_gloo_ratio']:6.4f} |",
                flush=True,
            )
            rows.append(row)
    for peer, most in MOST_RATIO.items():
        for form, key in (("expanded", f"{peer}_ratio"), ("in place", f"in_place_{peer}_ratio")):
            ratios = [row[key] for row in rows if key in row]
            if ratios:
                print(f"largest ratio to {peer}, {form}: {max(ratios):.4f} (promised: at most {most})")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()

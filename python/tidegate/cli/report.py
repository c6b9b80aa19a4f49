"""tidegate report: what runs here, and what would be patched."""

from pathlib import Path

NAME = "report"
HELP = "CPU, instruction sets, threads, versions; with a model: what would be patched in it"
DESCRIPTION = """\
Prints what the operators run on here: CPU, instruction set, threads, versions, environment. With the folder of a model
it also prints every place that tidegate.patch would take, without loading the weights."""
EXAMPLES = ("tidegate report", "tidegate report ~/models/Qwen3.5-0.8B", "tidegate report --json")


def add_arguments(parser):
    parser.add_argument(
        "model", nargs="?", metavar="MODEL_DIR|FAMILY", help="a folder, or a family for a tiny random model"
    )
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"


def facts():
    """tidegate.report() with the machine in front and the families behind it."""
    import importlib.util
    import os

    import tidegate
    from tidegate.cli import memory, models

    known = tidegate.report()
    head = {
        "cpu": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "memory available": memory.gib(memory.available()),
    }
    found = type(known)(head | known)
    if importlib.util.find_spec("transformers") is None:
        found["models"] = "transformers is not installed: pip install transformers"
    else:
        found["models"] = f"{models.known()}, and relatives that are found by their parts"
    return found


def places(name):
    """The report of a patch of the named model, installed on a copy without weights, or on a tiny random one."""
    import tidegate
    from tidegate.cli import models

    model = models.tiny(name, "auto") if name in models.families() else models.empty(name)
    with tidegate.patch(model, strict=False) as handle:
        return handle.report()


def run(options):
    found = facts()
    rows = places(options.model) if options.model else None
    if options.json:
        import json

        document = dict(found)
        if rows is not None:
            document["patch"] = [row._asdict() for row in rows]
        print(json.dumps(document, indent=1))
    else:
        print(found)
        if rows is not None:
            from tidegate.cli import models

            how = (
                "tried on a tiny random model"
                if options.model in models.families()
                else "without its weights and so not compared"
            )
            print(f"\nwhat tidegate.patch takes in {options.model}, {how}:\n{rows}")
    return 0

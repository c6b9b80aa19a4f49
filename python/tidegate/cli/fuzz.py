"""tidegate fuzz: random problems for every operator, compared with plain loops in fp64."""

import os
import subprocess
from pathlib import Path

from tidegate.cli.command import MISSING, Failure, positive, seed
from tidegate.options import environment

NAME = "fuzz"
HELP = "random problems for every operator against the fp64 reference, on this machine"
DESCRIPTION = """\
Draws problems at random and compares every result with the operator's definition in fp64. A problem is one line of
text, and the line is the repro: a failure prints it, and --line runs it again. Also checked: nothing outside the
tensors is touched, the same bits with other thread counts, and packed samples that do not see each other."""
EXAMPLES = (
    "tidegate fuzz --seconds 30 --seed 1",
    "tidegate fuzz --count 100000 --isa avx2",
    'tidegate fuzz --line "l2norm rows=3 D=17 in=bf16 seed=7"',
    "tidegate fuzz --list                            # the drivers, their keys and defaults",
)


def add_arguments(parser):
    parser.add_argument("--seconds", type=positive, help="how long (default 30, or as long as --count takes)")
    parser.add_argument("--count", type=positive, help="how many problems")
    parser.add_argument("--seed", type=seed, default=1, help="of the problems that are drawn (default 1)")
    parser.add_argument("--isa", help="one instruction set (default: TIDEGATE_ISA, or each problem draws its own)")
    parser.add_argument("--only", help="drivers, with commas between them (default: all)")
    parser.add_argument("--line", action="append", help="run this problem; may be repeated")
    parser.add_argument("--file", type=Path, help="run the problems of a file, one a line")
    parser.add_argument("--list", action="store_true", help="print every driver with its keys and defaults")


def program() -> Path:
    """The C++ program: in the installed package, or in a build folder of the source tree."""
    package = Path(__file__).resolve().parent.parent
    builds = sorted(package.parent.parent.glob("build*/tests/fuzz/tidegate_fuzz"), key=os.path.getmtime, reverse=True)
    for place in (package / "_bin" / "tidegate_fuzz", *builds):
        if place.is_file():
            return place
    raise Failure(
        "the program tidegate_fuzz is not there: it comes with the wheel, or with the C++ tests",
        "build it in a clone of the repository:  make cpp",
        MISSING,
    )


def check_file(path: Path) -> None:
    """The program refuses such files too; this answers where it is not there, in the command's own form."""
    if not path.is_file():
        raise Failure(f"--file {path}: no such file", "write one problem a line, as --list prints them")
    if not any(line and not line.startswith("#") for line in path.read_text(errors="replace").splitlines()):
        raise Failure(f"--file {path}: expected at least one problem, got none", "write one a line, as --list does")


def run(options):
    if options.file is not None:
        check_file(options.file)
    options.isa = options.isa or environment("isa")
    command = [str(program()), "--seed", str(options.seed)]
    for name in ("seconds", "count", "isa", "only", "file"):
        if (value := getattr(options, name)) is not None:
            command += [f"--{name}", str(value)]
    for line in options.line or ():
        command += ["--line", line]
    command += ["--list"] if options.list else []
    return subprocess.run(command, check=False).returncode

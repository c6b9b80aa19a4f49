#!/usr/bin/env python3
"""Builds the programs of coverage.sh, and reads what llvm-cov says about them.

    coverage.py build <build folder> <folder for coverage> <clang++> <jobs> <program>...
    coverage.py report <llvm-cov's JSON>

Counted are src/ and include/ without tests and timings: everything that is compiled once, and of the kernels the AVX2
instance (what only other sets have is not counted). Instances of one template are counted as one: a line, or
one way of a branch, is covered if any of them ran it. The report has a line a file with what nothing ran, then the sum.
"""

import concurrent.futures
import json
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

CORE = re.compile(r"/(src|include/tidegate)/")
# Tests and timings that stand beside the operators, the probes of the vocabulary, MPI's header.
OTHER = re.compile(
    r"(_test|/test|/bench)\.cpp$|(_case|_bench|bench_data|plain_chunk|probe|emulate_avx512|ep_mpi)\.h$|/probe\.cpp$"
)
# A region is line, column, end line, end column, count, file, expanded file, kind; a branch has two counts.
CODE, SKIPPED = 0, 2


FLAGS = ("-O1", "-fprofile-instr-generate", "-fcoverage-mapping", "-g0")


def objects(build, out, clang):
    """[(command, object)] of everything that is counted."""
    found = []
    for entry in json.loads(Path(build, "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        target = re.search(r"CMakeFiles/(tidegate_objects|kernel_\w+_avx2)\.dir/", entry["command"])
        if target:
            at = words.index("-o")
            name = Path(out, "objects", words[at + 1].replace("/", "_"))
            keep = [w for w in words[1:at] if not w.startswith("-O") and "ccache" not in w and not w.endswith("c++")]
            found.append(([clang, *keep, *FLAGS, "-c", entry["file"], "-o", str(name.resolve())], str(name)))
    return found


def build_programs(build, out, clang, jobs, *programs):
    Path(out, "objects").mkdir(parents=True, exist_ok=True)
    made = objects(build, out, clang)
    launcher = shlex.split(os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER", ""))
    with concurrent.futures.ThreadPoolExecutor(int(jobs)) as pool:
        list(pool.map(lambda job: subprocess.run([*launcher, *job[0]], check=True), made))
    for program in programs:
        shown = subprocess.run(
            ["ninja", "-C", build, "-t", "commands", program], capture_output=True, text=True, check=True
        )
        words = shlex.split(next(line for line in reversed(shown.stdout.splitlines()) if f"/{program} " in f"{line} "))
        begin = next(i for i, w in enumerate(words) if w.endswith("c++"))
        words = words[begin + 1 : words.index("&&", begin) if "&&" in words[begin:] else None]
        words[words.index("-o") + 1] = str(Path(out, program).resolve())
        names = [str(Path(name).resolve()) for _, name in made]
        # Before the library: what is defined here is not taken from there.
        first = next(i for i, w in enumerate(words) if w.endswith(".o"))
        subprocess.run([clang, *words[:first], *names, *words[first:], *FLAGS[1:2]], cwd=build, check=True)


def wanted(name):
    return CORE.search(name) and not OTHER.search(name)


def innermost(regions, line, column):
    """How often the smallest region around a place ran."""
    around = [r for r in regions if tuple(r[:2]) <= (line, column) < tuple(r[2:4]) and r[7] == CODE]
    return max(around, key=lambda r: (r[0], r[1]), default=[0] * 5)[4]


def lines_of(regions):
    """{line: count}: a line has the count of what starts on it, or of what goes on over it, whichever is larger."""
    found = {}
    # Outer regions first; inner ones (also lambdas, which are functions of their own) then say it better.
    for first, column, last, end, kind in sorted(regions, key=lambda r: (r[0], r[1], -r[2], -r[3])):
        count = regions[first, column, last, end, kind]
        for line in range(first, last + 1):
            if kind == SKIPPED:
                found.pop(line, None)
            elif kind == CODE and (line > first or count > found.get(line, -1)):
                found[line] = count
    return found


def gather(document):
    """(regions, branches): counts of all instances together, by file and place."""
    regions, branches = defaultdict(lambda: defaultdict(int)), defaultdict(dict)
    for function in document["data"][0]["functions"]:
        names = [n if wanted(n) else None for n in function["filenames"]]
        own = defaultdict(list)
        for r in function["regions"]:
            if name := names[r[5]]:
                own[name].append(r)
                regions[name][tuple(r[:4]) + (r[7],)] += r[4]
        for b in function["branches"]:
            if not (name := names[b[6]]):
                continue
            taken, other = b[4], b[5]
            # The compiler decides `if constexpr` and its like: it runs, and goes neither way.
            if taken == other == 0 and innermost(own[name], b[0], b[1]) > 0:
                continue
            before = branches[name].get(tuple(b[:4]), (0, 0))
            branches[name][tuple(b[:4])] = (before[0] + taken, before[1] + other)
    return regions, branches


def spans(numbers):
    """1, 2, 3, 7 as 1-3,7."""
    out = []
    for n in sorted(numbers):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def report(path):
    document = json.loads(Path(path).read_text())
    regions, branches = gather(document)
    lines = {name: lines_of(found) for name, found in regions.items()}
    total = [0, 0, 0, 0]
    for name in sorted(lines):
        missed = [n for n, count in lines[name].items() if count == 0]
        ways = [(place, way) for place, counts in branches[name].items() for way in (0, 1) if counts[way] == 0]
        row = [
            len(lines[name]) - len(missed),
            len(lines[name]),
            2 * len(branches[name]) - len(ways),
            2 * len(branches[name]),
        ]
        total = [a + b for a, b in zip(total, row, strict=True)]
        short = CORE.split(name, maxsplit=1)
        half = spans({place[0] for place, _ in ways} - set(missed))
        print(f"{short[1]}/{short[2]}: lines {row[0]}/{row[1]}, branches {row[2]}/{row[3]};", end=" ")
        print(f"not run {spans(missed)}; one way {half}")
    share = [100 * total[i] / max(total[i + 1], 1) for i in (0, 2)]
    print(f"lines {share[0]:.1f} % of {total[1]}, branches {share[1]:.1f} % of {total[3]}")


if __name__ == "__main__":
    {"build": build_programs, "report": report}[sys.argv[1]](*sys.argv[2:])

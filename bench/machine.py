"""What the figures were measured on: CPU, caches, kernel, versions, and the limits program's answer."""

import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DISTURBED = 0.06  # cores used by others; more than this changes ratios, because OpenMP peers spin at barriers


class Load:
    """Cores that others used since the object was made: the machine's busy ticks minus the CPU time of this process and
    of its finished children."""

    def __init__(self):
        self._start = self._read()

    @staticmethod
    def _read():
        with open("/proc/stat") as f:
            ticks = [int(t) for t in f.readline().split()[1:9]]  # user nice system idle iowait irq softirq steal
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return busy, sum(u.ru_utime + u.ru_stime for u in used), time.perf_counter()

    def cores(self) -> float:
        busy, own, wall = (b - a for a, b in zip(self._start, self._read(), strict=True))
        return max(0.0, (busy - own) / wall) if wall > 0 else 0.0


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _cpuinfo() -> dict[str, str]:
    """The first processor's entries."""
    first = (_read("/proc/cpuinfo") or "").split("\n\n")[0]
    return dict([part.strip() for part in line.split(":", 1)] for line in first.splitlines() if ":" in line)


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(str(index / n)) for n in ("level", "type", "size"))
        if level and size and kind != "Instruction":
            found[f"L{level}"] = size
    return found


def describe() -> dict:
    cpu = _cpuinfo()
    flags = cpu.get("flags", "").split()
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_bf16", "amx_int8")
    thp = _read("/sys/kernel/mm/transparent_hugepage/enabled") or "?"
    memory = next((line.split()[1] for line in (_read("/proc/meminfo") or "").splitlines() if "MemTotal" in line), "0")
    return {
        "cpu": cpu.get("model name", platform.machine()),
        "family_model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "features": [f for f in wanted if f in flags],
        "hypervisor": "hypervisor" in flags,
        "cores": len(os.sched_getaffinity(0)),
        "caches": _caches(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "kernel": platform.release(),
        "transparent_huge_pages": thp.partition("[")[2].partition("]")[0] or thp,
        "libc": " ".join(platform.libc_ver()),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "tidegate"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _program(path: str | None) -> Path | None:
    if path:
        return Path(path)
    built = sorted(ROOT.glob("build*/bench/tidegate_limits"), key=os.path.getmtime)
    return built[-1] if built else None


def limits(path: str | None, threads: int) -> dict:
    """The answer of tidegate_limits, or {"missing": why}. It runs before the engines, never beside them."""
    program = _program(path)
    if program is None:
        return {"missing": "tidegate_limits is not built (cmake --build <dir> --target tidegate_limits)"}
    load = Load()
    try:
        done = subprocess.run([program, str(threads)], capture_output=True, text=True, timeout=300, check=True)
        return json.loads(done.stdout) | {"foreign_cores": round(load.cores(), 3)}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"missing": f"{program.name}: {error}"}


def child_environment(threads: int, keep_memory: bool) -> dict[str, str]:
    """Same thread count for every pool, no network, and malloc's behaviour as the condition wants it."""
    env = dict(os.environ)
    for name in ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"):
        env.pop(name, None)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TIDEGATE_NUM_THREADS"):
        env[name] = str(threads)
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    if keep_memory:
        # glibc never gives memory back, so nobody pays for fresh pages after the warm-up.
        env |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
    return env

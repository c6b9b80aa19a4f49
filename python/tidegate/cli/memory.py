"""How much memory a model will take, before it is loaded."""

import json
import math
import struct
from pathlib import Path

from tidegate.cli.command import MISSING, Failure

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SLACK = 0.5 * 2**30  # torch, Transformers and the tokenizer
LARGEST_HEADER = 100 * 2**20  # of a safetensors file, as its own reader limits it


def _header(file: Path) -> dict:
    """name -> entry of the tensors in a safetensors file that is as long as it says."""
    again, there = "download or save the model again", file.stat().st_size
    with open(file, "rb") as stream:
        head = stream.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= size <= min(LARGEST_HEADER, there):
            raise Failure(f"{file} is not a safetensors file", again)
        try:
            header = json.loads(stream.read(size))
            header.pop("__metadata__", None)
            wanted = 8 + size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise Failure(f"{file} is not a safetensors file: its header cannot be read", again) from None
    if there != wanted:
        raise Failure(f"{file} is damaged: expected {wanted} bytes, got {there}", again)
    return header


def shapes(folder: Path) -> dict[str, list[int]] | None:
    """name -> shape of the tensors in a folder's safetensors files, from their headers alone; None without files."""
    files = sorted(folder.glob("*.safetensors"))
    found = {name: entry["shape"] for file in files for name, entry in _header(file).items()}
    return found if files else None


def count_parameters(folder: Path) -> int | None:
    """Parameters in the safetensors files of a folder; None if there are none."""
    found = shapes(folder)
    return None if found is None else sum(math.prod(shape) for shape in found.values())


def available() -> float:
    """Bytes that a new program may take without swapping; infinite where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def estimate(parameters: int, dtype: str, trainable: int = 0) -> float:
    """Bytes of weights, and for trainable ones of a gradient and two moments of AdamW, in the same type."""
    return (parameters + 3 * trainable) * DTYPE_BYTES[dtype] + SLACK


def logits(tokens: int, vocabulary: int) -> float:
    """Bytes of a training step's logits: in fp32, as probabilities, and their gradient."""
    return 3 * 4.0 * tokens * vocabulary


def gib(number: float) -> str:
    return f"{number / 2**30:.1f} GiB"


def ensure(needed: float, what: str, smaller: str) -> None:
    """Fails before anything is loaded if the estimate is more than there is; `smaller` says what would need less."""
    there = available()
    if needed > there:
        raise Failure(
            f"{what} needs about {gib(needed)} of memory, and {gib(there)} are available",
            f"{smaller}; or start anyway with --ignore-memory",
            MISSING,
        )

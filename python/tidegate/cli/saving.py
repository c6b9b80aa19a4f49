"""A result that is whole at any time: written beside its place, then renamed onto it."""

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path

from tidegate.cli.command import MISSING, Failure
from tidegate.cli.models import first_line


def _beside(output: Path, suffix: str) -> Path:
    real = output.resolve()
    return real.with_name(real.name + suffix)


def check_free(output: Path) -> None:
    """Fails if something is at the place of a result, or beside it where it is written first."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise Failure(f"--output {output} is there and not empty", "name another folder")
    if os.path.ismount(output):
        raise Failure(f"--output {output} is a mount point, which nothing can be renamed onto", "name a folder in it")
    for left in (_beside(output, ".partial"), _beside(output, ".old")):
        if left.exists():
            raise Failure(f"{left} is left of a run that was ended while it saved", "move or remove it")


def check_writable(output: Path) -> None:
    """Fails if nothing can be written beside the place of a result; tried before hours are spent on it."""
    partial = _beside(output, ".partial")
    try:
        partial.mkdir(parents=True)
        try:
            with tempfile.TemporaryFile(dir=partial) as probe:
                probe.write(b"0" * 4096)
        finally:
            partial.rmdir()
    except OSError as error:
        raise Failure(f"--output {output}: {error.strerror}", "name a folder that can be written", MISSING) from None


@contextlib.contextmanager
def uninterrupted():
    """Ctrl-C waits for the end of the block: half of an update is no model, half of a file no result."""
    if threading.current_thread() is not threading.main_thread():  # where signals do not arrive
        yield
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:  # also where the block failed
            raise KeyboardInterrupt


def save(output: Path, *parts) -> None:
    """Calls save_pretrained of every part. Fails with what was at the place before still there, and nothing else."""
    partial, old = _beside(output, ".partial"), _beside(output, ".old")
    try:
        for part in parts:
            part.save_pretrained(partial)
        if output.exists():
            os.rename(output.resolve(), old)
        try:
            os.rename(partial, output.resolve())
        except OSError:
            if old.exists():
                os.rename(old, output.resolve())
            raise
    except Exception as error:  # noqa: BLE001  (a full disk is an OSError here and another one in safetensors)
        shutil.rmtree(partial, ignore_errors=True)
        before = "what was saved before is whole" if output.exists() else "nothing is saved"
        raise Failure(
            f"--output {output}: cannot save: {first_line(error)}",
            f"{before}; make room, or name another folder",
            MISSING,
        ) from None
    shutil.rmtree(old, ignore_errors=True)

"""What the subcommands share: exit codes, and the one way to fail."""

import importlib.util

WRONG = 1  # a comparison failed
USAGE = 2  # the call or its input is wrong
MISSING = 3  # this machine lacks something: a package, memory, a program
INTERRUPTED = 130

EXIT_CODES = """exit codes:
  0  done, and everything that was compared is equal
  1  a comparison failed
  2  the call is wrong: an unknown option, a missing folder, a model that is not supported
  3  something is missing here: a package, memory, a program, room on a disk
  130  interrupted"""


class Failure(Exception):
    """Ends the command: one line that says what is wrong, and one that says what to do."""

    def __init__(self, what, remedy, code=USAGE):
        super().__init__(f"{what}\n  {remedy}")
        self.code = code


def require(package, why):
    """Fails, with the line that installs it, unless a package can be imported."""
    if importlib.util.find_spec(package) is None:
        raise Failure(f"{why} needs the package {package}", f"install it:  pip install {package}", MISSING)


def set_threads(threads):
    """Threads of torch's pool, which is also that of the operators; None leaves them alone."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def positive(text):
    """An argparse type: an integer from 1 on."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


positive.__name__ = "number from 1 on"  # argparse: "invalid number from 1 on value: '0'"


def threads(text):
    """An argparse type: threads of a pool. Far more than a machine has end the process inside torch."""
    value = int(text)
    if not 1 <= value <= 4096:
        raise ValueError
    return value


threads.__name__ = "number from 1 to 4096"


def rate(text):
    """An argparse type: a positive, finite number."""
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise ValueError
    return value


rate.__name__ = "positive number"


def temperature(text):
    """An argparse type: a finite number from 0 on."""
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise ValueError
    return value


temperature.__name__ = "number from 0 on"


def seed(text):
    """An argparse type: what torch takes as a seed, without the negative ones."""
    value = int(text)
    if not 0 <= value < 2**64:
        raise ValueError
    return value


seed.__name__ = "number from 0 to 2**64 - 1"

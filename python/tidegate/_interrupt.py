"""Ctrl-C while the command `tidegate` still imports torch ends it with one line, as it does later on.

A handler, not an exception: what is being imported may catch one or add a traceback, and there is nothing to lose yet.
Imported first by the package, so that it stands before anything slow. Programs that import Tidegate see nothing of it.
"""

import os
import signal
import sys
import threading


def _end(_signal, _frame):
    os.write(2, b"tidegate: interrupted\n")
    os._exit(130)


def _is_command():
    """The installed script, or python -m tidegate, which has no name of its own yet."""
    name = sys.argv[0] if getattr(sys, "argv", None) else ""
    if name == "-m":
        return sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] == ["tidegate"]
    return os.path.basename(name) in ("tidegate", "tidegate.exe")


def begin():
    """Takes Ctrl-C over, unless somebody else has."""
    main = threading.current_thread() is threading.main_thread()
    if main and _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def give_back():
    """From here on Ctrl-C is an exception again, for the command to catch."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


begin()

"""The command `tidegate`: one file a subcommand, each a thin program on the public API.

A subcommand is a module with NAME, HELP, DESCRIPTION, EXAMPLES, add_arguments(parser) and run(options) -> exit code.
Nothing heavy is imported before a subcommand runs, so that --help and wrong calls answer at once.
"""

import argparse
import os
import sys

from tidegate import _interrupt
from tidegate.cli import bench, check, fuzz, generate, report, train
from tidegate.cli.command import EXIT_CODES, INTERRUPTED, MISSING, USAGE, Failure
from tidegate.errors import OptionError, PackedInputError

COMMANDS = (report, check, bench, generate, train, fuzz)


def parser():
    """The parser of all subcommands."""
    style = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="tidegate",
        description="Fast, exact CPU operators for gated-delta + MoE models (Qwen3-Next, Qwen3.5, Qwen3.6).",
        epilog=EXIT_CODES,
        formatter_class=style,
    )
    top.add_argument("--version", action="store_true", help="print the version and stop")
    commands = top.add_subparsers(metavar="COMMAND", title="commands")
    for module in COMMANDS:
        lines = "\n".join(f"  {line}" for line in module.EXAMPLES)
        sub = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.DESCRIPTION,
            epilog=f"examples:\n{lines}\n\n{EXIT_CODES}",
            formatter_class=style,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return top


def main(arguments=None):
    """Runs the command line and returns its exit code."""
    top = parser()
    options = top.parse_args(arguments)
    try:
        _interrupt.give_back()
        if options.version:
            from tidegate import __version__

            print(f"tidegate {__version__}")
            return 0
        if not hasattr(options, "run"):
            top.print_help()
            return 2
        return options.run(options)
    except Failure as failure:
        print(f"tidegate: {failure}", file=sys.stderr)
        return failure.code
    except KeyboardInterrupt:
        print("tidegate: interrupted; a result that was not there yet is not saved", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OptionError, PackedInputError) as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return USAGE
    except ValueError as error:
        if not str(error).startswith("TIDEGATE_ISA: "):
            raise
        print(f"tidegate: {error}", file=sys.stderr)
        return USAGE
    except OSError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return MISSING

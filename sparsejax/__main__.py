"""The command line: `python -m sparsejax explain` and `python -m sparsejax doctor`.

A command is a module with two functions: `add(subparsers)` describes its arguments, and
`run(options)` prints its results and returns the exit status.
"""

import argparse
import os
import select
import signal
import sys

from sparsejax.advise.doctor import command as doctor_command
from sparsejax.advise.explain import command as explain_command
from sparsejax.errors import SparsejaxError


COMMANDS = (explain_command, doctor_command)


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m sparsejax")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add(subparsers).set_defaults(run=command.run)
    options = parser.parse_args(argv)
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except (SparsejaxError, OSError, ImportError, AttributeError, TypeError) as error:
        if isinstance(error, BrokenPipeError) and _is_closed(sys.stdout):
            # As by `| head`: the reader has what it wanted.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        print(f"error: {error}", file=sys.stderr)
        return 2


def _is_closed(stream):
    """Returns whether the reader of a pipe is gone."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())

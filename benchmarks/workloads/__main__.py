"""Runs one part, or all of them; see the package's docstring."""

import importlib
import sys


PARTS = ("accuracy", "network", "curves", "table")


def main(argv: list[str]) -> int:
    if argv and argv[0] not in PARTS and argv[0] != "--peers":
        print(f"name one of {', '.join(PARTS)}, or none, got {argv[0]!r}.", file=sys.stderr)
        return 2
    if argv and argv[0] in PARTS:
        return _run(argv[0], argv[1:])
    # Those of the network alone have peers.
    return max(_run(part, argv if part == "network" else []) for part in PARTS)


def _run(part, argv):
    return importlib.import_module(f"benchmarks.workloads.{part}").main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

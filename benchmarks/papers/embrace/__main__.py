"""Runs one of the comparisons; see the package's docstring."""

import importlib
import sys


PARTS = ("sizes", "training", "network")


def main(argv: list[str]) -> int:
    part = argv[0] if argv else ""
    if part not in PARTS:
        print(f"name one of {', '.join(PARTS)}, got {part!r}.", file=sys.stderr)
        return 2
    module = importlib.import_module(f"benchmarks.papers.embrace.{part}")
    return module.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

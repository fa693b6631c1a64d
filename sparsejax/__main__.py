"""The command line: `python -m sparsejax explain`."""

import argparse
import importlib
import re
import sys
from typing import Any

import sparsejax
from sparsejax.advise.explain import abstract
from sparsejax.errors import SparsejaxError


_LEAF = re.compile(r"(?P<path>[^=]+)=(?P<shape>\d+(x\d+)*)(:(?P<dtype>\w+))?")


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(argv)
    try:
        tx, params = _target(options)
        density: Any = options.density
        if options.leaf_density:
            density = dict(_pair(text) for text in options.leaf_density)
            if options.density is not None:
                density[""] = options.density
        ranks: Any = options.ranks
        if options.inner > 1:
            ranks = (options.ranks, options.inner)
        found = sparsejax.explain(
            tx,
            params,
            ranks=ranks,
            gbit_per_s=options.gbit_per_s,
            latency_us=options.latency_us,
            density=density,
        )
    except (SparsejaxError, OSError, ImportError, AttributeError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(found.to_json() if options.json else found)
    return 0


def _parser():
    parser = argparse.ArgumentParser(prog="python -m sparsejax")
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser(
        "explain",
        help="say what a synchronization would send, and how long it would take",
        description="Says, without any device, what the synchronization of a model's "
        "gradients would send, how long each scheme would take, and where dense is better.",
    )
    explain.add_argument(
        "model",
        nargs="?",
        help="module:name of the parameters, of a pair (optimizer, parameters), or of a "
        "function that returns either",
    )
    explain.add_argument(
        "--leaf",
        action="append",
        default=[],
        metavar="PATH=ROWSxWIDTH[:DTYPE]",
        help="a leaf instead of a model, such as embedding=50000x512:bfloat16; may repeat",
    )
    explain.add_argument("--plan", help="the JSON file of a plan to explain")
    explain.add_argument("--ranks", type=_positive, required=True, help="ranks, or hosts")
    explain.add_argument(
        "--inner", type=_positive, default=1, help="ranks of a host, for two levels"
    )
    explain.add_argument("--gbit-per-s", type=float, required=True)
    explain.add_argument("--latency-us", type=float, required=True)
    explain.add_argument("--density", type=float, help="of one rank's gradient; 0.01")
    explain.add_argument(
        "--leaf-density",
        action="append",
        default=[],
        metavar="PATTERN=DENSITY",
        help="of the leaves whose path matches; may repeat",
    )
    explain.add_argument("--json", action="store_true", help="print a JSON object")
    return parser


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _target(options):
    """The optimizer and the parameters to explain."""
    axis = ("hosts", "devices") if options.inner > 1 else None
    tx = sparsejax.zen_sync(axis)
    plan = sparsejax.Plan.load(options.plan) if options.plan else None
    if plan is not None:
        tx = sparsejax.sync(plan, axis)
    if options.model and options.leaf:
        raise SparsejaxError("name a model or leaves, not both.")
    if options.model:
        module, _, name = options.model.partition(":")
        if not name or not module or module.startswith("."):
            raise SparsejaxError(
                f"the model must be written module:name, got {options.model!r}."
            )
        sys.path.insert(0, "")
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        found = found() if callable(found) else found
        if isinstance(found, tuple) and len(found) == 2 and hasattr(found[0], "update"):
            return found
        return tx, found
    if options.leaf:
        shapes = {}
        for text in options.leaf:
            match = _LEAF.fullmatch(text)
            if not match:
                raise SparsejaxError(
                    f"a leaf is written PATH=ROWSxWIDTH[:DTYPE], got {text!r}."
                )
            if match["path"] in shapes:
                raise SparsejaxError(f"the leaf {match['path']!r} is given twice.")
            shape = tuple(int(n) for n in match["shape"].split("x"))
            shapes[match["path"]] = (shape, match["dtype"] or "float32")
        return tx, abstract(shapes)
    if plan is not None:
        shapes = {leaf.path: (leaf.shape, leaf.dtype) for leaf in plan.leaves}
        return tx, abstract(shapes)
    raise SparsejaxError("nothing to explain: name a model, --leaf or --plan.")


def _pair(text):
    pattern, _, value = text.rpartition("=")
    try:
        if not pattern:
            raise ValueError
        return pattern, float(value)
    except ValueError:
        raise SparsejaxError(
            f"a density is written PATTERN=NUMBER, got {text!r}."
        ) from None


if __name__ == "__main__":
    sys.exit(main())

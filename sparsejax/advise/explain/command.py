"""The command `python -m sparsejax explain`."""

import argparse
import importlib
import inspect
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.advise.explain.explanation import explain
from sparsejax.advise.plan import Plan
from sparsejax.errors import ArgumentError
from sparsejax.schemes.forecast import Network
from sparsejax.transforms.sync import sync
from sparsejax.transforms.systems import zen_sync


_LEAF = re.compile(r"(?P<path>[^=]+)=(?P<shape>\d+(x\d+)*)(:(?P<dtype>\w+))?")


def add(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the command and its arguments to the command line."""
    parser = subparsers.add_parser(
        "explain",
        help="say what a synchronization would send, and how long it would take",
        description="Says, without any device, what the synchronization of a model's "
        "gradients would send, how long each scheme would take, and where dense is better.",
    )
    add_model(parser)
    parser.add_argument("--ranks", type=_positive, required=True, help="ranks, or hosts")
    parser.add_argument(
        "--inner", type=_positive, default=1, help="ranks of a host, for two levels"
    )
    parser.add_argument("--gbit-per-s", type=float, required=True)
    parser.add_argument("--latency-us", type=float, required=True)
    parser.add_argument(
        "--exchange-us",
        type=float,
        default=0.0,
        help="what a sparse exchange takes whatever its size: about 300 on a GPU (0)",
    )
    parser.add_argument(
        "--platform",
        choices=("cpu", "gpu", "tpu"),
        help="of the devices on which steps will run (JAX's default here)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a model and the density of its gradient."""
    parser.add_argument(
        "model",
        nargs="?",
        help="module:name of the parameters, of a pair (optimizer, parameters), or of a "
        "function that returns either",
    )
    parser.add_argument(
        "--leaf",
        action="append",
        default=[],
        metavar="PATH=ROWSxWIDTH[:DTYPE]",
        help="a leaf instead of a model, such as embedding=50000x512:bfloat16; may repeat",
    )
    parser.add_argument("--plan", help="the JSON file of a plan to explain")
    parser.add_argument("--density", type=float, help="of every leaf's gradient")
    parser.add_argument(
        "--leaf-density",
        action="append",
        default=[],
        metavar="PATTERN=DENSITY",
        help="of the leaves whose path matches; may repeat",
    )
    parser.add_argument(
        "--ids",
        action="append",
        default=[],
        metavar="PATTERN=NUMBER",
        help="ids that a rank lists a step, of tables whose gradients are rows; may repeat",
    )


def run(options: argparse.Namespace) -> int:
    """Prints the explanation, and returns the exit status."""
    tx, params = target(options)
    two_levels = options.inner > 1
    explanation = explain(
        tx,
        params,
        ranks=(options.ranks, options.inner) if two_levels else options.ranks,
        network=Network(options.gbit_per_s, options.latency_us, options.exchange_us),
        density=density(options),
        ids=ids(options),
        platform=options.platform,
    )
    print(explanation.to_json() if options.json else explanation)
    return 0


def density(options: argparse.Namespace) -> Any:
    """Returns the densities of the arguments, as `explain` takes them."""
    if not options.leaf_density:
        return options.density
    found = dict(_pattern_and_density(text) for text in options.leaf_density)
    return found if options.density is None else found | {"": options.density}


def ids(options: argparse.Namespace) -> dict[str, int] | None:
    """Returns the numbers of ids of the arguments, as `explain` takes them."""
    return dict(map(_pattern_and_ids, options.ids)) or None


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def target(options: argparse.Namespace) -> tuple[Any, Any]:
    """Returns the optimizer and the parameters that the arguments name."""
    axis = ("hosts", "devices") if getattr(options, "inner", 1) > 1 else None
    plan = Plan.load(options.plan) if options.plan else None
    tx = zen_sync(axis) if plan is None else sync(plan, axis)
    if options.model and options.leaf:
        raise ArgumentError("name a model or leaves, not both.")
    if options.model:
        model = imported(options.model)
        if isinstance(model, tuple) and len(model) == 2 and hasattr(model[0], "update"):
            return model
        return tx, model
    if options.leaf:
        return tx, _leaves(options.leaf)
    if plan is not None:
        return tx, {leaf.path: _leaf(leaf.shape, leaf.dtype) for leaf in plan.leaves}
    raise ArgumentError("nothing to explain: name a model, --leaf or --plan.")


def imported(text: str) -> Any:
    """Imports the object that "module:name" names; if it is callable, its result."""
    module, _, name = text.partition(":")
    if not name or not module or module.startswith("."):
        raise ArgumentError(f"the model must be written module:name, got {text!r}.")
    sys.path.insert(0, "")
    model = importlib.import_module(module)
    for part in name.split("."):
        model = getattr(model, part)
    if not callable(model):
        return model
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        raise ArgumentError(
            f"{text} is a {type(model).__name__} that cannot be called without arguments "
            f"({error}). Name parameters, a pair (optimizer, parameters), or a function of "
            "no arguments that returns either; the parameters of a flax model are "
            "nnx.state(model, nnx.Param), or model.init(key, x)."
        ) from None
    return model()


def _leaves(texts):
    """Returns abstract parameters, as the arguments --leaf describe them."""
    leaves = {}
    for text in texts:
        match = _LEAF.fullmatch(text)
        if not match:
            raise ArgumentError(f"a leaf is written PATH=ROWSxWIDTH[:DTYPE], got {text!r}.")
        if match["path"] in leaves:
            raise ArgumentError(f"the leaf {match['path']!r} is given twice.")
        shape = tuple(int(n) for n in match["shape"].split("x"))
        leaves[match["path"]] = _leaf(shape, match["dtype"] or "float32")
    return leaves


def _leaf(shape, dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _pattern_and_density(text):
    pattern, _, value = text.rpartition("=")
    try:
        if not pattern:
            raise ValueError
        return pattern, float(value)
    except ValueError:
        raise ArgumentError(f"a density is written PATTERN=NUMBER, got {text!r}.") from None


def _pattern_and_ids(text):
    pattern, _, value = text.rpartition("=")
    if not pattern or not value.isdecimal():
        raise ArgumentError(f"ids are written PATTERN=NUMBER, got {text!r}.")
    return pattern, int(value)

"""What a transformation is made of: exchanges, sparsifiers, and the wrappers around them.

A transformation of optax is two closures, and whatever chains, masks or partitions it calls
the `init` of every part. So while it is observed, each part's `init` reports what it is and
which leaves it has, and makes no state by rank: nothing is computed, and no mesh is needed.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from sparsejax.state import tree


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapper:
    """A wrapper around parts of a chain; each is another one, even where two are equal.

    Attributes:
        every: The number of calls per run of the chain inside.
        dense_steps: How many first runs of the chain inside send densely.
        takes_rows: Whether it hands on gradients that are `RowGrads`.
        is_round: Whether it hands on no gradients, but what ranks have moved by then.
    """

    every: int = 1
    dense_steps: int = 0
    takes_rows: bool = True
    is_round: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """An exchange or a sparsifier that was seen.

    Attributes:
        part: The `Exchange` or the `Select`.
        paths: Of its leaves.
        leaves: The leaves, or their shapes and dtypes.
        buckets: Of an exchange; none of a sparsifier.
        inside: The wrappers around it, the outermost first.
        shards: Of an exchange: the paths of leaves that ranks share out; it sends none.
    """

    part: Any
    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    buckets: tuple[Any, ...]
    inside: tuple[Wrapper, ...]
    shards: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class OfRows:
    """What updates rows of tables, as it was seen.

    Attributes:
        part: The optimizer.
        paths: Of the leaves whose gradients may be `RowGrads`.
        behind: How many exchanges stand in front of it.
    """

    part: Any
    paths: tuple[str, ...]
    behind: int


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """What is to know which rows the next step reads, as it was seen.

    Attributes:
        part: What it is.
        paths: The tables whose rows these are.
        inside: The wrappers around it, the outermost first.
    """

    part: Any
    paths: tuple[str, ...]
    inside: tuple[Wrapper, ...]


@dataclasses.dataclass
class Observed:
    """The parts of a transformation that send, choose what is sent, or update rows.

    Attributes:
        exchanges: In the order in which they stand in the chain.
        sparsifiers: Alike.
        rows: Alike.
        ahead: Alike.
        inside: While it is observed: the wrappers around what is looked at.
    """

    exchanges: list[Part] = dataclasses.field(default_factory=list)
    sparsifiers: list[Part] = dataclasses.field(default_factory=list)
    rows: list[OfRows] = dataclasses.field(default_factory=list)
    ahead: list[Lookahead] = dataclasses.field(default_factory=list)
    inside: tuple[Wrapper, ...] = ()


_OBSERVED: contextvars.ContextVar[Observed | None] = contextvars.ContextVar(
    "observed", default=None
)


def is_observing() -> bool:
    """Whether `init` is asked what there is, and not for a state."""
    return _OBSERVED.get() is not None


def report_exchange(
    part: Any,
    paths: Sequence[str],
    leaves: Sequence[Any],
    buckets: Sequence[Any],
    shards: Sequence[str] = (),
) -> None:
    """Reports an exchange to the observer."""
    seen = _OBSERVED.get()
    assert seen is not None
    of = tuple(paths), tuple(leaves), tuple(buckets)
    seen.exchanges.append(Part(part, *of, seen.inside, tuple(shards)))


def report_sparsifier(part: Any, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Reports a sparsifier to the observer."""
    seen = _OBSERVED.get()
    assert seen is not None
    seen.sparsifiers.append(Part(part, tuple(paths), tuple(leaves), (), seen.inside))


def report_rows(part: Any, paths: Sequence[str]) -> None:
    """Reports an optimizer that updates rows of these leaves to the observer."""
    seen = _OBSERVED.get()
    assert seen is not None
    seen.rows.append(OfRows(part, tuple(paths), len(seen.exchanges)))


def report_ahead(part: Any, paths: Sequence[str]) -> None:
    """Reports what needs the rows that the next step reads to the observer."""
    seen = _OBSERVED.get()
    assert seen is not None
    seen.ahead.append(Lookahead(part, tuple(paths), seen.inside))


@contextlib.contextmanager
def inside(wrapper: Wrapper) -> Iterator[None]:
    """Reports to the observer, if any, that what follows is in a wrapper."""
    seen = _OBSERVED.get()
    if seen is None:
        yield
        return
    around, seen.inside = seen.inside, (*seen.inside, wrapper)
    try:
        yield
    finally:
        seen.inside = around


def observed(tx: optax.GradientTransformation, params: Any) -> Observed:
    """The exchanges and sparsifiers in a transformation, however deep."""
    tree.check_transformation(tx, params)
    seen = Observed()
    token = _OBSERVED.set(seen)
    try:
        # A fresh function, and none inside it cached: JAX would remember this run.
        with jax.disable_jit():
            jax.eval_shape(lambda params: tx.init(params), jax.tree.map(_anywhere, params))
    finally:
        _OBSERVED.reset(token)
    return seen


def _anywhere(x):
    """A leaf that is on no mesh: what ranks compute has no type of an Explicit axis."""
    placed = isinstance(getattr(x, "sharding", None), NamedSharding)
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if placed else x

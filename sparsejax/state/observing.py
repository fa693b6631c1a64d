"""Lists the parts of a transformation: exchanges, sparsifiers, and wrappers around them.

An optax transformation is a pair of closures, but a chain, a mask or a partition calls the
`init` of each of its parts. So while a transformation is observed, the `init` of each part
reports the part and its leaves, and makes no state by rank: nothing is computed, and no
mesh is needed.
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
    """A wrapper around parts of a chain, compared by identity.

    Attributes:
        every: The wrapped chain runs at every `every`-th call.
        dense_steps: The number of first runs of the wrapped chain that send densely.
        takes_rows: Whether it passes gradients that are `RowGrads` to the chain.
        is_round: Whether it gives the chain the differences of local steps, in place of
            gradients.
    """

    every: int = 1
    dense_steps: int = 0
    takes_rows: bool = True
    is_round: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """An exchange or a sparsifier of an observed transformation.

    Attributes:
        part: The `Exchange` or the `Select`.
        paths: The paths of its leaves.
        leaves: The shapes and dtypes of its leaves.
        buckets: The buckets of an exchange; () for a sparsifier.
        inside: The wrappers around it, the outermost first.
        shards: For an exchange, the paths of leaves that are sharded among the ranks, which
            it does not send.
    """

    part: Any
    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    buckets: tuple[Any, ...]
    inside: tuple[Wrapper, ...]
    shards: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class OfRows:
    """An optimizer of an observed transformation that updates rows of tables.

    Attributes:
        part: The optimizer.
        paths: The paths of the leaves whose gradients may be `RowGrads`.
        exchanges_before: The number of exchanges that precede it in the chain.
    """

    part: Any
    paths: tuple[str, ...]
    exchanges_before: int


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """A part of an observed transformation that needs the rows which the next step reads.

    Attributes:
        part: The part.
        paths: The paths of the tables whose rows it needs.
        inside: The wrappers around it, the outermost first.
    """

    part: Any
    paths: tuple[str, ...]
    inside: tuple[Wrapper, ...]


@dataclasses.dataclass
class Observed:
    """The parts of a transformation that send, choose what is sent, or update rows.

    Attributes:
        exchanges: The exchanges, in the order of the chain.
        sparsifiers: The sparsifiers, in the order of the chain.
        rows: The optimizers that update rows, in the order of the chain.
        ahead: The parts that need the rows of the next step, in the order of the chain.
        memories: The memories of exchanges and sparsifiers, in the order of the chain.
        inside: While it is observed, the wrappers around the part whose `init` runs.
    """

    exchanges: list[Part] = dataclasses.field(default_factory=list)
    sparsifiers: list[Part] = dataclasses.field(default_factory=list)
    rows: list[OfRows] = dataclasses.field(default_factory=list)
    ahead: list[Lookahead] = dataclasses.field(default_factory=list)
    memories: list[Any] = dataclasses.field(default_factory=list)
    inside: tuple[Wrapper, ...] = ()


_OBSERVED: contextvars.ContextVar[Observed | None] = contextvars.ContextVar(
    "observed", default=None
)


def is_observing() -> bool:
    """Returns whether `init` is called to report its parts, and not to make a state."""
    return _OBSERVED.get() is not None


def report_exchange(
    part: Any,
    paths: Sequence[str],
    leaves: Sequence[Any],
    buckets: Sequence[Any],
    shards: Sequence[str] = (),
) -> None:
    """Reports an exchange to the observer."""
    seen = _seen()
    of = tuple(paths), _shapes(leaves), tuple(buckets)
    seen.exchanges.append(Part(part, *of, seen.inside, tuple(shards)))


def report_sparsifier(part: Any, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Reports a sparsifier to the observer."""
    seen = _seen()
    seen.sparsifiers.append(Part(part, tuple(paths), _shapes(leaves), (), seen.inside))


def _seen():
    seen = _OBSERVED.get()
    assert seen is not None  # only `init` while `is_observing` reports
    return seen


def _shapes(leaves):
    """Returns shapes and dtypes: a leaf of a traced `init` must not outlive its trace."""
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)


def report_rows(part: Any, paths: Sequence[str]) -> None:
    """Reports an optimizer that updates rows of these leaves to the observer."""
    seen = _seen()
    seen.rows.append(OfRows(part, tuple(paths), len(seen.exchanges)))


def report_ahead(part: Any, paths: Sequence[str]) -> None:
    """Reports a part that needs the rows which the next step reads to the observer."""
    seen = _seen()
    seen.ahead.append(Lookahead(part, tuple(paths), seen.inside))


def report_memory(memory: Any) -> None:
    """Reports the memory of an exchange or a sparsifier to the observer."""
    _seen().memories.append(memory)


@contextlib.contextmanager
def inside(wrapper: Wrapper) -> Iterator[None]:
    """Reports parts that are initialized inside as wrapped, if there is an observer."""
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
    """Returns the parts of a transformation, however deeply they are nested."""
    tree.check_transformation(tx, params)
    seen = Observed()
    token = _OBSERVED.set(seen)
    try:
        # A new function without jit inside: JAX must not cache this trace.
        with jax.disable_jit():
            jax.eval_shape(lambda params: tx.init(params), jax.tree.map(_off_mesh, params))
    finally:
        _OBSERVED.reset(token)
    return seen


def _off_mesh(x):
    """Returns the shape of a leaf without its mesh: inside, no type has Explicit axes."""
    placed = isinstance(getattr(x, "sharding", None), NamedSharding)
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if placed else x

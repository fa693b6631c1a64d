"""The typing rules of `shard_map`, and what JAX calls them: the one file that casts.

Under `jax.shard_map` with checking on (`check_vma=True`, the default) the type of a value
says over which mesh axes it varies. Loops and branches want equal types on all sides, and
`out_specs=P()` wants a value that does not vary. Under `vmap(axis_name=...)` and with
checking off there are no such types, and everything here is the identity.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which x varies; empty with checking off."""
    # `.vma` before JAX 0.10, `.manual_axis_type` since; 0.10 is the oldest supported.
    if isinstance(x, jax.ShapeDtypeStruct):
        # It says so itself; `typeof` fails where the mesh has axes that are not manual.
        return frozenset() if x.manual_axis_type is None else x.manual_axis_type.varying
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def invarying(x: Any) -> Any:
    """Returns what JAX calls the type of a value like x that varies over no axis."""
    return jax.typeof(x).manual_axis_type.update(varying=frozenset())


def as_varying(tree: Any, axes: frozenset[str]) -> Any:
    """Makes every leaf vary over at least these axes: a change of type, no work."""

    def cast(x):
        missing = tuple(sorted(axes - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def untyped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that sends nothing, so that it is traced with no types of axes.

    JAX traces, lowers and compiles it once then, whatever its operands vary over, and casts
    none of its constants. Results vary over all axes over which an operand does.
    """

    @functools.wraps(function)
    def call(*operands, **options):
        axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(operands)))
        return as_varying(function(*without_types(operands, axes), **options), axes)

    return call


def same_trace(x: Any, y: Any) -> bool:
    """Whether two arrays are of one program that is being traced, or both are concrete.

    A branch of a `cond`, or the body of a loop, is a program of its own.
    """
    # JAX has no public name for it; `_trace` is that of 0.10 to 0.12.
    return getattr(x, "_trace", None) is getattr(y, "_trace", None)


# There is no cast from varying to invarying; this primitive is one. A recursive doubling
# leaves the same bits on every rank, though no collective that JAX knows to do so has made
# them: there it is used where the sums commute pair by pair, and tested on bytes. A kernel
# knows nothing of types: there it is undone right after.
_same_everywhere = Primitive("sparsejax_same_everywhere")


@_same_everywhere.def_impl
def _(x, *, axes):
    del axes
    return x


@_same_everywhere.def_abstract_eval
def _(x, *, axes):
    manual = x.manual_axis_type
    return x.update(manual_axis_type=manual.update(varying=manual.varying - set(axes)))


mlir.register_lowering(_same_everywhere, lambda ctx, x, *, axes: [x])
ad.deflinear2(_same_everywhere, lambda ct, x, *, axes: [as_varying(ct, axes)])
batching.primitive_batchers[_same_everywhere] = lambda args, dims, *, axes: (
    _same_everywhere.bind(*args, axes=axes),
    dims[0],
)


def as_invarying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Makes x not vary over these axes, whatever the ranks have: a change of type."""
    axes = axes & varying_axes(x)
    return _same_everywhere.bind(x, axes=axes) if axes else x


def without_types(tree: Any, axes: frozenset[str]) -> Any:
    """Makes no leaf vary over these axes, for a function that sends nothing."""
    return jax.tree.map(lambda x: as_invarying(x, axes), tree)

"""The VMA types of `shard_map`: the only file that reads and casts them.

Under `jax.shard_map` with `check_vma=True` (the default) the type of a value has the mesh
axes over which it varies. Loops and branches require equal types on all sides, and
`out_specs=P()` requires a value that does not vary. Under `vmap(axis_name=...)` and with
`check_vma=False` there are no such types, and all functions here are the identity.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which x varies; empty with `check_vma=False`."""
    # `.vma` before JAX 0.10, `.manual_axis_type` since; 0.10 is the oldest supported.
    if isinstance(x, jax.ShapeDtypeStruct):
        # Read from the attribute: `typeof` fails where a mesh axis is not manual.
        return frozenset() if x.manual_axis_type is None else x.manual_axis_type.varying
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def invarying(x: Any) -> Any:
    """Returns the `manual_axis_type` of a value like x that varies over no axis."""
    return jax.typeof(x).manual_axis_type.update(varying=frozenset())


def as_varying(tree: Any, axes: frozenset[str]) -> Any:
    """Casts leaves to vary over at least these axes, which changes only their types."""

    def cast(x):
        missing = tuple(sorted(axes - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def untyped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function without collectives, so that it is traced without VMA types.

    JAX then traces, lowers and compiles it once, whatever axes its operands vary over, and
    casts none of its constants. Results vary over all axes over which an operand varies.
    """

    @functools.wraps(function)
    def call(*operands, **options):
        axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(operands)))
        return as_varying(function(*without_types(operands, axes), **options), axes)

    return call


def same_trace(x: Any, y: Any) -> bool:
    """Returns whether two arrays belong to the same trace, or both are concrete.

    A branch of a `cond`, and the body of a loop, have traces of their own.
    """
    # JAX has no public attribute for it; `_trace` is that of 0.10 to 0.12.
    return getattr(x, "_trace", None) is getattr(y, "_trace", None)


# JAX has no cast from varying to invarying; this primitive is one. A recursive doubling
# computes the same bits on every rank, but by collectives whose results JAX types as
# varying. There it is used because the sums commute pair by pair, which is tested on bytes.
# Around kernels, which have no VMA types, it is undone right after the call.
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
    """Types x as equal over these axes, whether it is or not; changes only its type."""
    axes = axes & varying_axes(x)
    return _same_everywhere.bind(x, axes=axes) if axes else x


def without_types(tree: Any, axes: frozenset[str]) -> Any:
    """Types leaves as equal over these axes, for a function without collectives."""
    return jax.tree.map(lambda x: as_invarying(x, axes), tree)

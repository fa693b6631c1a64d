"""Reduces auxiliary outputs: averages, sums, or stacks them over the ranks."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError
from sparsejax.state import tree
from sparsejax.training.on_rank.shares import Share


KINDS = ("mean", "sum", "stack")

# By default scalars are averaged. The mean over ranks of an array with an element for each
# example would mix different examples, so users must request it.
SCALARS = "mean of scalars"


def check(aux: Any) -> None:
    """Raises unless all leaves are one of `KINDS`, or `SCALARS`."""
    for kind in jax.tree.leaves(aux, is_leaf=lambda node: node is None):
        if kind not in (*KINDS, SCALARS):
            raise ArgumentError(
                "aux must be 'mean', 'sum' or 'stack', or a tree of these like the "
                f"auxiliary outputs, or a prefix of one; got {kind!r}."
            )


def specs(aux: Any, axis_name: AxisName) -> Any:
    """Returns the PartitionSpecs of outputs: stacked ones are sharded over the ranks."""
    stacked, same = PartitionSpec(axis_name), PartitionSpec()
    return jax.tree.map(lambda kind: stacked if kind == "stack" else same, aux)


def put_together(outputs: Any, aux: Any, share: Share) -> Any:
    """Reduces outputs over the ranks.

    Args:
        outputs: The outputs of this rank.
        aux: The reduction of each: a tree of `KINDS`, or a prefix of one.
        share: The share of this rank in means.
    """

    def below(path, kind, outputs):
        one = lambda further, x: _one((*path, *further), x, kind, share)
        return jax.tree_util.tree_map_with_path(one, outputs)

    try:
        return jax.tree_util.tree_map_with_path(below, aux, outputs)
    except ArgumentError:
        raise
    except ValueError as error:
        raise ArgumentError(
            "aux must be a tree like the auxiliary outputs that loss_fn returns, or a "
            f"prefix of one: {error}"
        ) from None


def _one(keys, x, kind, share):
    path = tree.named(keys)
    name = f"the auxiliary output {path!r}" if path else "the auxiliary output"
    dtype = getattr(x, "dtype", None)
    if dtype is None and isinstance(x, (bool, int, float, complex)):
        dtype = jnp.result_type(x)
    if dtype is None or not (
        jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool)
    ):
        raise ArgumentError(
            f"{name} is {type(x).__name__ if dtype is None else dtype}; only numbers can "
            "be put together over ranks. Leave it out, or return it as numbers."
        )
    x = jnp.asarray(x)
    share.require_same_elsewhere(f"what loss_fn returns, {name},", x)
    if kind == "stack":
        return share.wire.per_rank(x if x.shape else x[None])
    if kind == SCALARS and x.shape:
        raise ArgumentError(
            f"{name} is an array {list(x.shape)} on each rank: say what becomes of it. "
            "aux='stack' puts the ranks' arrays one after another, right where an example "
            "has an entry each; aux='sum' and 'mean' add them up and average them; a tree, "
            "such as aux={'logits': 'stack', 'accuracy': 'mean'}, says it for each."
        )
    return share.sum(x) if kind == "sum" else share.mean(x)

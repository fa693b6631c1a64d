"""The computation of a step: carries gradients, and applies them block after block."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sparsejax import axes
from sparsejax.axes import AxisName
from sparsejax.embrace.horizontal import blocks
from sparsejax.embrace.horizontal.cuts import Cut
from sparsejax.embrace.horizontal.independence import check_apart
from sparsejax.errors import ArgumentError, LeafError, StateError
from sparsejax.rows import apply_updates
from sparsejax.state import observing, tree
from sparsejax.state.per_rank import (
    OUTLINE,
    PerRank,
    check_kind,
    check_like,
    check_ranks,
)
from sparsejax.transforms.buckets import of_part
from sparsejax.wire.collectives import Wire


_NAME = "sparsejax.embrace.horizontal"


class HorizontalState(NamedTuple):
    """State of `horizontal` between two steps.

    Attributes:
        held: int32 [], the number of steps whose gradients are not applied yet, 0 or 1.
        carried: `PerRank`: the carried gradients, a tree like the parameters, in their
            dtypes, with an `optax.MaskedNode` for a leaf that is not carried.
        blocks: The chain's state of each block, by the name of the block.
        rest: The chain's state of the leaves that are not carried; None if all are.
    """

    held: jax.Array
    carried: PerRank | None
    blocks: dict[str, Any]
    rest: Any

    @property
    def chains(self) -> list[Any]:
        """The states of the chain: of each block, and of the rest."""
        return [*self.blocks.values(), self.rest]


class Begun(NamedTuple):
    """State of `horizontal` within a step, between `begin` and `update`.

    Attributes:
        blocks: See `HorizontalState`.
        rest: See `HorizontalState`.
    """

    blocks: dict[str, Any]
    rest: Any


class HorizontalSchedule(NamedTuple):
    """The functions of the transformation that `horizontal` returns, and its arguments.

    Attributes:
        tx: The chain.
        order: The blocks in order, or a function that returns them; if None, the order is
            an argument of `begin`.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        at_once: The path prefixes of leaves that are not carried.
    """

    tx: optax.GradientTransformationExtraArgs
    order: Any
    axis_name: AxisName | None
    at_once: tuple[str, ...]

    def init(self, params: Any) -> Any:
        """Returns the first state, with zeros in place of carried gradients."""
        cut = self._cut(params)
        if not observing.is_observing():
            self._check(params, cut)
        own = observing.Wrapper(takes_rows=False)
        with of_part():
            with observing.inside(own):
                inner = {b.name: self.tx.init(cut.of_block(b)) for b in cut.blocks}
            rest = cut.rest()
            rest = None if rest is None else self.tx.init(rest)
        if observing.is_observing():
            return HorizontalState(jnp.int32(0), None, inner, rest)
        why = f"{_NAME} carries the gradients of each rank into the next step"
        wire = Wire(axes.resolve_for_state(self.axis_name, _NAME, why))
        if not OUTLINE.get():
            block_of = {path: block.name for block in cut.blocks for path in block.paths}
            with of_part():
                check_apart(self.tx, cut.only(lambda _: True), block_of, wire)
        carried = [
            _zeros((1, *x.shape), x.dtype, axes.varying_axes(x), wire) if held else x
            for x, held in zip(cut.leaves, cut.carried, strict=True)
        ]
        return HorizontalState(jnp.int32(0), _carried(cut, carried, wire), inner, rest)

    def begin(self, params, state, order):
        """See `Horizontal.begin`."""
        cut = self._cut(params)
        sequence = cut.blocks
        if order is not None:
            names = [name if isinstance(name, str) else ", ".join(name) for name in order]
            sequence = blocks.ordered(cut.blocks, names)
        elif self.order is None:
            raise ArgumentError(
                "begin of horizontal needs the order of the blocks, and was given none: "
                "horizontal(tx, order=[...]), or tx.begin(params, state, order), with "
                "order = sparsejax.embrace.find_order(loss_fn, params, batch)."
            )
        return self._begun(params, state, cut, sequence)

    def flush(self, params, state, of_rest):
        """See `Horizontal.flush`."""
        cut = self._cut(params)
        params, begun = self._begun(params, state, cut, cut.blocks)
        wire = Wire.over(self.axis_name, f"flush of {_NAME}")
        zeros = lambda x: _zeros(x.shape, x.dtype, axes.varying_axes(x), wire)
        carried = state.carried.with_value(jax.tree.map(zeros, state.carried.value))
        cut, rest = self._cut(params), begun.rest
        if of_rest is not None and (given := cut.rest()) is not None:
            others, rest = of_rest(given, rest)
            params = cut.merged(cut.leaves, others)
        return params, HorizontalState(jnp.int32(0), carried, begun.blocks, rest)

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        """Takes the second half of a step: carries gradients, and updates other leaves."""
        if OUTLINE.get() and isinstance(state, HorizontalState):
            cut = self._cut(params)
            params, state = self._begun(params, state, cut, cut.blocks)
        if isinstance(state, HorizontalState):
            raise StateError(
                f"update of {_NAME} was given the state between two steps: the gradients "
                "that it carries were not applied, and would be lost. A step begins with "
                "params, state = tx.begin(params, state), and the gradients are those of "
                "these parameters. sparsejax.data_parallel does so where tx is what "
                "horizontal returned, and no optax.chain around it."
            )
        if extra.get("weight") is not None:
            raise ArgumentError(
                f"update of {_NAME} was given weight=, and gradients that it carries are "
                "averaged in the next step, without weights. Multiply the loss by the "
                "weight of the rank over the mean of all weights."
            )
        check_kind(state, Begun, _NAME)
        wire = Wire.over(self.axis_name, f"update of {_NAME}")
        cut = self._cut(updates)
        own = self._cut(params) if params is not None else None
        for i, path in enumerate(cut.paths):
            if cut.carried[i]:
                _check_gradient(path, cut.leaves[i], own and own.leaves[i], wire)
        sent = [
            _nothing(x, wire) if held else x
            for x, held in zip(cut.leaves, cut.carried, strict=True)
        ]
        made, rest = cut.with_leaves(sent), state.rest
        if (given := cut.rest()) is not None:
            if extra.get("ids"):
                there = {p for p, held in zip(cut.paths, cut.carried, strict=True) if held}
                ids = {p: x for p, x in extra["ids"].items() if p not in there}
                extra = extra | {"ids": ids}
            with of_part():
                others, rest = self.tx.update(given, rest, own and own.rest(), **extra)
            made = cut.merged(sent, others)
        rows = [
            x[None] if held else x for x, held in zip(cut.leaves, cut.carried, strict=True)
        ]
        carried = _carried(cut, rows, wire)
        return made, HorizontalState(jnp.int32(1), carried, state.blocks, rest)

    def _cut(self, given):
        return Cut.of(given, self.order, self.at_once)

    def _check(self, params, cut):
        """Raises if the chain does not synchronize, or updates carried leaves by rows."""
        seen = observing.observed(self.tx, params)
        if not seen.exchanges:
            raise ArgumentError(
                "horizontal wraps nothing that synchronizes: put the whole chain in it, "
                "optax.chain(sparsejax.dense_sync(), optax.adam(1e-3))."
            )
        by_rows = {path for part in seen.rows for path in part.paths}
        pairs = zip(cut.paths, cut.carried, strict=True)
        wrong = [path for path, held in pairs if held and path in by_rows]
        if wrong:
            raise ArgumentError(
                f"horizontal: the chain updates {wrong[0]!r} by rows, and rows are not "
                "carried. Name such tables in at_once, and give the others an optimizer "
                "that is not lazy, by optax.partition."
            )

    def _begun(self, params, state, cut, sequence):
        """Applies the carried gradients, block after block."""
        check_kind(state, HorizontalState, _NAME)
        wire = Wire.over(self.axis_name, f"begin of {_NAME}")
        names = [block.name for block in cut.blocks]
        if set(names) != set(state.blocks):
            raise StateError(
                f"the state of {_NAME} has the blocks {sorted(state.blocks)}, and the "
                f"parameters have {sorted(names)}: make it with the order and the "
                "parameters that are trained."
            )
        check_ranks(state.carried, wire.ranks)
        check_like(state.carried, cut.paths, cut.leaves, cut.structure)
        rows = cut.structure.flatten_up_to(state.carried.value)
        place = {path: i for i, path in enumerate(cut.paths)}
        leaves, inner, before = list(cut.leaves), dict(state.blocks), []
        choose = functools.partial(_chosen, state.held > 0)
        for block in sequence:
            own = [place[path] for path in block.paths]
            given = _behind([rows[i][0] for i in own], before)
            grads = cut._replace(leaves=_put(leaves, own, given)).of_block(block)
            old, was = cut.of_block(block), state.blocks[block.name]
            # The name of a block's operations in profiles and compiled programs.
            with of_part(), jax.named_scope(f"reduce {block.name}"):
                updates, after = self.tx.update(grads, was, old)
            new = choose(apply_updates(old, updates), old)
            inner[block.name] = choose(after, was)
            before = [cut.structure.flatten_up_to(new)[i] for i in own]
            leaves = _put(leaves, own, before)
        return cut.with_leaves(leaves), Begun(inner, state.rest)


def _put(leaves, places, values):
    made = list(leaves)
    for i, value in zip(places, values, strict=True):
        made[i] = value
    return made


def _behind(grads, before):
    """Returns gradients that depend on the updated parameters of the block before."""
    if not before:
        return grads
    # A barrier gives all its outputs the same varying axes; this restores those of inputs.
    made = lax.optimization_barrier((grads, before))[0]
    return [
        axes.assume_same(x, tuple(axes.varying_axes(x) - axes.varying_axes(old)))
        for x, old in zip(made, grads, strict=True)
    ]


def _chosen(held, new, old):
    """Returns the new values of a block if gradients were carried, else the old ones."""
    return jax.tree.map(lambda x, y: jnp.where(held, x, y), new, old)


def _carried(cut, rows, wire):
    """Makes `HorizontalState.carried` from arrays [1, ...]."""
    pairs = zip(rows, cut.carried, strict=True)
    value = [x if held else optax.MaskedNode() for x, held in pairs]
    ranks = jnp.int32(wire.ranks)
    return PerRank(cut.structure.unflatten(value), wire.axis, ranks=ranks)


def _zeros(shape, dtype, over, wire):
    return wire.per_rank(axes.as_varying(jnp.zeros(shape, dtype), over))


def _nothing(leaf, wire):
    """Returns an update of -0.0, which leaves any parameter unchanged, -0.0 too."""
    over = tree.axes_of(leaf) - frozenset(axes.axis_names(wire.axis))
    return axes.as_varying(jnp.full(leaf.shape, -0.0, leaf.dtype), over)


def _check_gradient(path, leaf, param, wire):
    """Raises if a gradient cannot be carried."""
    tree.check_dtype(path, leaf)
    if tree.is_sparse(leaf) or not isinstance(leaf, jax.Array):
        raise LeafError(
            f"horizontal: the gradient of {path!r} is {type(leaf).__name__}, and whole "
            "arrays are carried: name the leaf in at_once."
        )
    axes.require_local(path, leaf, wire.axis)
    if param is not None and leaf.dtype != param.dtype:
        raise LeafError(
            f"horizontal: the gradient of {path!r} is {leaf.dtype}, and the parameter "
            f"{param.dtype}: what is carried has the parameter's dtype. Cast the gradient."
        )

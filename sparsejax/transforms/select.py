"""A sparsifier with its memory, as an optax transformation.

Nothing goes over the wire here but what shards of a tensor agree on (`model_axis`) and, if
asked for, one bit on which all ranks agree (`skip_nonfinite`). Each leaf of the gradient
comes out as a `SparseTensor` of what goes now, and the synchronization behind takes it as
it is. What does not go, for whatever reason, is in the memory:

    due  =  what waited + gradient  =  what goes + what waits

What goes is rounded to the gradient's dtype; what is held is float32 or wider, and keeps
what rounding took.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hashing
from sparsejax import axes, wire
from sparsejax.axes import AxisName, as_varying, varying_axes
from sparsejax.errors import AlreadySummedError, ArgumentError, StateError
from sparsejax.sparsifiers import base
from sparsejax.transforms import buckets as leaf_rules
from sparsejax.transforms.memory import Held, Memory
from sparsejax.transforms.state.per_rank import (
    OBSERVER,
    PerRank,
    SparsifyState,
    check_ranks,
)
from sparsejax.units import bits
from sparsejax.units.sparse_tensor import SparseTensor


# With one threshold for all leaves, or all shards, one may get so many times its share.
_UNEVEN = 8


@dataclasses.dataclass(frozen=True)
class Sparsify:
    """The two functions of the transformation; see `sparsejax.sparsify`."""

    sparsifier: base.Sparsifier
    axis_name: AxisName | None
    memory: Memory | None
    clip_norm: float | None
    global_: bool
    min_size: int
    compress: Callable[[str, Any], bool] | None
    model_axis: AxisName | None
    skip_nonfinite: bool
    seed: int

    def sparsifies(self, path: str, leaf: Any) -> bool:
        """Whether a leaf is sparsified; else it goes whole."""
        if leaf.size < max(self.min_size, 1):
            return False
        return self.compress is None or bool(self.compress(path, leaf))

    def init(self, params: Any) -> Any:
        """The state for parameters like these."""
        paths, leaves, structure = leaf_rules.flatten(params)
        for path, leaf in zip(paths, leaves, strict=True):
            leaf_rules.check_dtype(path, leaf)
        names = leaf_rules.distinct(paths)
        own = self._first_states(names, paths, leaves)
        zero = lambda: jnp.int32(0)
        if OBSERVER.get() is not None:
            return SparsifyState(zero(), None, None, None, zero())
        if self.memory is None and not jax.tree.leaves(own):
            return SparsifyState(zero(), None, None, None, zero())
        axis_name = axes.resolve_for_state(
            self.axis_name,
            "a sparsejax sparsifier",
            "a sparsifier keeps on each rank what was not sent",
        )

        def zeros():
            held = [leaf_rules.zeros_by_rank(leaf, axis_name) for leaf in leaves]
            return PerRank(structure.unflatten(held), axis_name)

        own_of = dict(zip(names, zip(paths, leaves, strict=True), strict=True))
        shards = axes.axis_names(self.model_axis) if self.model_axis else ()
        states = {}
        for name, tree in own.items():
            about = [own_of[each] for each in (names if self.global_ else [name])]
            axes_of = frozenset().union(*(varying_axes(leaf) for _, leaf in about))
            # Shards of a tensor have one, too, where they share a threshold.
            axes_of -= frozenset(shards)
            typed = lambda x, axes_of=axes_of: as_varying(x[None], axes_of)
            first = wire.per_rank(jax.tree.map(typed, tree), axis_name)
            of = tuple(path for path, _ in about)
            states[name] = PerRank(first, axis_name, of, shards)
        memory = self.memory
        return SparsifyState(
            zero(),
            zeros() if memory else None,
            zeros() if memory and memory.has_momentum else None,
            states if jax.tree.leaves(states) else None,
            zero(),
        )

    def _first_states(self, names, paths, leaves):
        chosen = [
            (name, leaf)
            for name, path, leaf in zip(names, paths, leaves, strict=True)
            if self.sparsifies(path, leaf)
        ]
        if self.global_ and chosen:
            dtype = jnp.result_type(*(leaf_rules.wide(leaf.dtype) for _, leaf in chosen))
            size = sum(leaf.size for _, leaf in chosen)
            return {"": self.sparsifier.init(size, dtype)}
        return {
            name: self.sparsifier.init(leaf.size, leaf_rules.wide(leaf.dtype))
            for name, leaf in chosen
        }

    def update(self, updates: Any, state: Any, params: Any = None, **extra) -> Any:
        """What goes of the gradients, and the next state."""
        del params, extra
        axis_name = axes.resolve(self.axis_name, "update of a sparsejax sparsifier")
        if self.model_axis is not None:
            shards = axes.resolve(self.model_axis, "model_axis of a sparsejax sparsifier")
            if set(axes.axis_names(shards)) & set(axes.axis_names(axis_name)):
                raise ArgumentError(
                    f"model_axis={shards!r} is the axis of the ranks, or one of them; it "
                    "is the one over which tensors are sharded."
                )
        return self.on(axis_name, updates, state)

    def on(
        self,
        axis_name: AxisName,
        updates: Any,
        state: Any,
        *,
        whole: bool = False,
        like: Any = None,
    ) -> tuple[Any, SparsifyState]:
        """`update` on the ranks of an axis.

        Args:
            axis_name: The axis.
            updates: The gradients.
            state: The state.
            whole: Whether everything that is due goes.
            like: What goes has the dtypes of this tree, where gradients are wider.
        """
        paths, leaves, structure = leaf_rules.flatten(updates)
        self._check(paths, leaves, state, axis_name)
        bad = self._not_finite(leaves, axis_name) if self.skip_nonfinite else None
        leaves = self._clipped(leaves, axis_name)
        helds = self._unpacked(structure, state, leaves)
        due, helds = self._due(leaves, helds)
        own, rank = self._own(state), wire.rank(axis_name)
        shapes = leaves if like is None else structure.flatten_up_to(like)
        going, helds, own = self._select(
            paths, shapes, due, helds, own, state.step, whole, rank
        )
        after = self._packed(structure, leaves, helds, own, state, axis_name)
        if bad is not None:
            going = [_nothing(x, bad) for x in going]
            kept = jax.tree.map(lambda old, new: jnp.where(bad, old, new), state, after)
            skipped = state.skipped + bad.astype(jnp.int32)
            after = kept._replace(skipped=skipped)
        after = after._replace(step=state.step + 1)
        return structure.unflatten(going), after

    def _check(self, paths, leaves, state, axis_name):
        for path, leaf in zip(paths, leaves, strict=True):
            leaf_rules.check_dtype(path, leaf)
            if leaf_rules.is_sparse(leaf):
                raise ArgumentError(
                    f"the gradient of {path!r} is sparsified already: two sparsifiers in "
                    "one chain would each keep what the other has sent. Use one of them."
                )
            try:
                axes.require_local(path, leaf, axis_name)
            except AlreadySummedError as error:
                raise AlreadySummedError(
                    f"{error} A sparsifier stands before the synchronization: "
                    "optax.chain(sparsejax.dgc(0.01), sparsejax.zen_sync(), ...)."
                ) from None
        together = self.global_ or self.clip_norm is not None
        shards = sorted({tuple(sorted(varying_axes(leaf))) for leaf in leaves})
        if together and self.model_axis is None and len(shards) > 1:
            raise ArgumentError(
                f"some leaves vary over {shards[0]} and others over {shards[-1]}, and what "
                "all have together (global_, clip_norm) would differ from shard to shard: "
                "give the sparsifier model_axis, the axis over which they are sharded."
            )
        if (self.memory is not None) != (state.residual is not None):
            raise StateError(
                f"the sparsifier has memory={self.memory!r}, and the state was made with "
                "another."
            )
        check_ranks((state.residual, state.momentum), wire.ranks(axis_name))

    def _not_finite(self, leaves, axis_name):
        """Whether any rank has a number that is not finite; the same on all."""
        bad = jnp.int32(0)
        for leaf in leaves:
            bad = jnp.maximum(bad, jnp.any(~jnp.isfinite(leaf)).astype(jnp.int32))
        bad, _ = wire.maximum(wire.per_rank(bad, axis_name), axis_name)
        return bad > 0

    def _clipped(self, leaves, axis_name):
        """Scaled so that the sum over n ranks is clipped at the norm, if all are alike."""
        if self.clip_norm is None:
            return leaves
        wide = [leaf.astype(leaf_rules.wide(leaf.dtype)) for leaf in leaves]
        # What is not finite would make everything so.
        finite = [jnp.where(jnp.isfinite(x), x, 0) for x in wide]
        square: Any = sum(self._over_shards(jnp.sum(x * x)) for x in finite)
        most = self.clip_norm * wire.ranks(axis_name) ** -0.5
        scale = most / jnp.maximum(jnp.sqrt(square), most)
        return [
            (x * scale).astype(leaf.dtype) for x, leaf in zip(wide, leaves, strict=True)
        ]

    def _over_shards(self, square):
        """Added up over the shards of a leaf; one that all of them have counts once."""
        if self.model_axis is None:
            return square
        names = frozenset(axes.axis_names(self.model_axis))
        if axes.is_checking(self.model_axis) and not names & varying_axes(square):
            return square
        return wire.psum(wire.per_rank(square, self.model_axis), self.model_axis)[0]

    def _unpacked(self, structure, state, leaves):
        """What is held of each leaf, flat."""
        if state.residual is None:
            return [None] * len(leaves)
        residual = structure.flatten_up_to(state.residual.value)
        momentum = [None] * len(leaves)
        if state.momentum is not None:
            momentum = structure.flatten_up_to(state.momentum.value)
        flat = lambda x: x[0].reshape(-1)
        return [
            Held(flat(r), None if m is None else flat(m))
            for r, m in zip(residual, momentum, strict=True)
        ]

    def _packed(self, structure, leaves, helds, own, state, axis_name):
        def tree(name):
            shaped = [
                getattr(held, name).reshape(1, *leaf.shape)
                for held, leaf in zip(helds, leaves, strict=True)
            ]
            return PerRank(structure.unflatten(shaped), axis_name)

        if state.residual is not None:
            state = state._replace(residual=tree("residual"))
        if state.momentum is not None:
            state = state._replace(momentum=tree("momentum"))
        if state.sparsifiers is not None:
            after = {
                path: before.with_value(jax.tree.map(lambda x: x[None], own[path]))
                for path, before in state.sparsifiers.items()
            }
            state = state._replace(sparsifiers=after)
        return state

    def _own(self, state):
        """The sparsifier's own states, by path."""
        if state.sparsifiers is None:
            return {}
        first = lambda own: jax.tree.map(lambda x: x[0], own.value)
        return {path: first(own) for path, own in state.sparsifiers.items()}

    def _due(self, leaves, helds):
        """What would go if there were no limit."""
        due = []
        for i, (leaf, held) in enumerate(zip(leaves, helds, strict=True)):
            flat = leaf.reshape(-1).astype(leaf_rules.wide(leaf.dtype))
            if held is not None and self.memory is not None:
                flat, helds[i] = self.memory.due(flat, held)
            due.append(flat)
        return due, helds

    def _select(self, paths, leaves, due, helds, own, step, whole, rank):
        """What goes of each leaf, what is held then, and the sparsifier's states."""
        pairs = enumerate(zip(paths, leaves, strict=True))
        chosen = [] if whole else [i for i, pair in pairs if self.sparsifies(*pair)]
        own = dict(own)
        names = leaf_rules.distinct(paths)
        draws = {i: self._draw(step, names[i], due[i].size, rank) for i in chosen}
        found = self._places(names, due, chosen, draws, own)
        going = []
        for i, leaf in enumerate(leaves):
            if i in found:
                x, helds[i] = self._taken(leaf, due[i], helds[i], found[i], draws[i])
            else:
                x, helds[i] = self._rounded(leaf, due[i], helds[i], draws.get(i))
            going.append(x)
        return going, helds, own

    def _rounded(self, leaf, due, held, draw):
        """A leaf of which all goes, rounded if it was chosen, and what is held then."""
        x = due
        if draw is not None:
            sparsifier: Any = self.sparsifier
            x = sparsifier.rounded(due, draw)
            if self.memory is not None:
                x = x * sparsifier.shrink(due.size * draw.shards)
        goes = _narrowed(x, leaf.dtype)
        if held is not None:
            held = held._replace(residual=_lost(due, goes))
        return goes.reshape(leaf.shape), held

    def _draw(self, step, name, size, rank):
        """What a sparsifier may know; ranks agree on it without a message."""
        shards = wire.ranks(self.model_axis) if self.model_axis is not None else 1
        number = zlib.crc32(f"{self.seed} {name}".encode())
        seed = hashing.mix32(step.astype(jnp.uint32), number)
        wanted = self.sparsifier.wanted(size * shards, step)
        return base.Draw(step, seed, wanted, rank, self.model_axis)

    def _places(self, names, due, chosen, draws, own):
        """Where the selected elements of each leaf are."""
        sparsifier: Any = self.sparsifier
        if isinstance(sparsifier, base.Rounding) or not chosen:
            return {}
        found = {}
        if not self.global_:
            for i in chosen:
                room = sparsifier.capacity(due[i].size)
                if isinstance(sparsifier, base.ByMagnitude):
                    # One shard may have more than its share of what is large.
                    room = min(due[i].size, min(_UNEVEN, draws[i].shards) * room)
                found[i], own[names[i]] = sparsifier.select(
                    due[i], own.get(names[i], ()), draws[i], room
                )
            return found
        dtype = jnp.result_type(*(due[i].dtype for i in chosen))
        together = jnp.concatenate([due[i].astype(dtype) for i in chosen])
        first = draws[chosen[0]]
        draw = self._draw(first.step, "", together.size, first.rank)
        level, own[""] = sparsifier.level(together, own.get("", ()), draw)
        level = sparsifier.settled(together, level, draw)
        count = jnp.int32(0)
        most = sparsifier.capacity(together.size)
        for i in chosen:
            size = due[i].size
            room = min(size, most, _UNEVEN * sparsifier.capacity(size))
            least = base.as_dtype(level, dtype, due[i].dtype)
            own_draw = draws[i]._replace(alone=False)
            found[i], held = sparsifier.take(due[i], least, own_draw, room)
            count = count + held
        own[""] = sparsifier.after(own[""], draw.total(count), draw)
        return found

    def _taken(self, leaf, due, held, found, draw):
        """A leaf's entries at these places, and what is held without them."""
        values = due.at[found].get(mode="fill", fill_value=0)
        sparsifier: Any = self.sparsifier
        if self.memory is None:
            values = values * sparsifier.scale(due.size, draw)
        goes = _narrowed(values, leaf.dtype)
        tensor = SparseTensor(found, goes, leaf.shape, shared=sparsifier.shared)
        if held is None or self.memory is None:
            return tensor, held
        apart = bits.apart(found, found < due.size, due.size)
        left = _lost(values, goes)
        residual = due.at[apart].set(left, mode="drop", unique_indices=True)
        return tensor, self.memory.gone(held._replace(residual=residual), apart)


def _narrowed(x, dtype):
    """Numbers as they go; what is finite stays so, and the rest of it waits."""
    if jnp.dtype(dtype) == x.dtype:
        return x
    most = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x).astype(dtype)


def _lost(due, goes):
    """What rounding takes; nothing of what is not finite, which would stay for ever."""
    lost = due - goes.reshape(-1).astype(due.dtype)
    return jnp.where(jnp.isfinite(lost), lost, 0)


def _nothing(x, bad):
    """A leaf of which nothing goes if something was bad."""
    if isinstance(x, SparseTensor):
        units = jnp.where(bad, x.units, x.indices)
        return dataclasses.replace(x, indices=units)
    return jnp.where(bad, jnp.zeros_like(x), x)

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
from jax import lax

from pallas_kernels import hashing
from sparsejax import _compat, axes, leaves as leaf_rules, wire
from sparsejax._compat import AxisName, as_varying, varying_axes
from sparsejax.errors import AlreadySummedError, ArgumentError, AxisError, StateError
from sparsejax.memory import Held, Memory
from sparsejax.sparse_tensor import SparseTensor
from sparsejax.sparsifiers import base
from sparsejax.state import PerRank, SparsifyState


# With one threshold for all leaves, one of them may get so many times its own share.
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
        own = self._first_states(paths, leaves)
        zero = lambda: jnp.int32(0)
        if self.memory is None and not jax.tree.leaves(own):
            return SparsifyState(zero(), None, None, None, zero())
        try:
            axis_name = axes.resolve(self.axis_name, "init of a sparsejax sparsifier")
        except AxisError as error:
            if _compat.manual_axes():
                raise error
            raise StateError(
                "a sparsifier keeps on each rank what was not sent, so its state must be "
                "made where the ranks are known: call sparsejax.init(tx, params, mesh) "
                "instead of tx.init(params)."
            ) from None

        def per_rank(x, like):
            return wire.per_rank(as_varying(x[None], varying_axes(like)), axis_name)

        def zeros():
            held = [per_rank(jnp.zeros(p.shape, _wide(p.dtype)), p) for p in leaves]
            return PerRank(structure.unflatten(held), axis_name)

        if leaves:
            own = jax.tree.map(lambda x: per_rank(x, leaves[0]), own)
        memory = self.memory
        return SparsifyState(
            zero(),
            zeros() if memory else None,
            zeros() if memory and memory.has_momentum else None,
            PerRank(own, axis_name) if jax.tree.leaves(own) else None,
            zero(),
        )

    def _first_states(self, paths, leaves):
        chosen = [
            (path, leaf)
            for path, leaf in zip(paths, leaves, strict=True)
            if self.sparsifies(path, leaf)
        ]
        if self.global_ and chosen:
            dtype = jnp.result_type(*(_wide(leaf.dtype) for _, leaf in chosen))
            size = sum(leaf.size for _, leaf in chosen)
            return {"": self.sparsifier.init(size, dtype)}
        return {
            path: self.sparsifier.init(leaf.size, _wide(leaf.dtype))
            for path, leaf in chosen
        }

    def update(self, updates: Any, state: Any, params: Any = None, **extra) -> Any:
        """What goes of the gradients, and the next state."""
        del params, extra
        axis_name = axes.resolve(self.axis_name, "update of a sparsejax sparsifier")
        return self.on(axis_name, updates, state)

    def on(
        self, axis_name: AxisName, updates: Any, state: Any, whole: bool = False
    ) -> tuple[Any, SparsifyState]:
        """`update` on the ranks of an axis; `whole` sends everything that is due."""
        paths, leaves, structure = leaf_rules.flatten(updates)
        self._check(paths, leaves, state, axis_name)
        bad = self._not_finite(leaves, axis_name) if self.skip_nonfinite else None
        leaves = self._clipped(leaves, axis_name)
        helds = self._unpacked(structure, state, leaves)
        due, helds = self._due(leaves, helds)
        going, helds, own = self._select(
            paths, leaves, due, helds, self._own(state), state.step, whole
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
        if (self.memory is not None) != (state.residual is not None):
            raise StateError(
                f"the sparsifier has memory={self.memory!r}, and the state was made with "
                "another."
            )

    def _not_finite(self, leaves, axis_name):
        """Whether any rank has a number that is not finite; the same on all."""
        bad = jnp.int32(0)
        for leaf in leaves:
            bad = jnp.maximum(bad, jnp.any(~jnp.isfinite(leaf)).astype(jnp.int32))
        bad, _ = wire.maximum(wire.per_rank(bad, axis_name), axis_name)
        if self.model_axis is not None:
            bad, _ = wire.maximum(wire.per_rank(bad, self.model_axis), self.model_axis)
        return bad > 0

    def _clipped(self, leaves, axis_name):
        """Scaled so that the sum over n ranks is clipped at the norm, if all are alike."""
        if self.clip_norm is None:
            return leaves
        wide = [leaf.astype(_wide(leaf.dtype)) for leaf in leaves]
        square: Any = sum(jnp.sum(x * x) for x in wide)
        if self.model_axis is not None:
            square, _ = wire.psum(wire.per_rank(square, self.model_axis), self.model_axis)
        most = self.clip_norm * wire.ranks(axis_name) ** -0.5
        scale = most / jnp.maximum(jnp.sqrt(square), most)
        return [
            (x * scale).astype(leaf.dtype) for x, leaf in zip(wide, leaves, strict=True)
        ]

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
            own = jax.tree.map(lambda x: x[None], own)
            state = state._replace(sparsifiers=PerRank(own, axis_name))
        return state

    def _own(self, state):
        """The sparsifier's own states, by path."""
        if state.sparsifiers is None:
            return {}
        return jax.tree.map(lambda x: x[0], state.sparsifiers.value)

    def _due(self, leaves, helds):
        """What would go if there were no limit."""
        due = []
        for i, (leaf, held) in enumerate(zip(leaves, helds, strict=True)):
            flat = leaf.reshape(-1).astype(_wide(leaf.dtype))
            if held is not None and self.memory is not None:
                flat, helds[i] = self.memory.due(flat, held)
            due.append(flat)
        return due, helds

    def _select(self, paths, leaves, due, helds, own, step, whole):
        """What goes of each leaf, what is held then, and the sparsifier's states."""
        chosen = (
            []
            if whole
            else [i for i, path in enumerate(paths) if self.sparsifies(path, leaves[i])]
        )
        going: list[Any] = [
            x.astype(leaf.dtype) for x, leaf in zip(due, leaves, strict=True)
        ]
        going = [x.reshape(leaf.shape) for x, leaf in zip(going, leaves, strict=True)]
        own = dict(own)
        draws = {i: self._draw(step, paths[i], due[i].size) for i in chosen}
        found = self._places(paths, due, chosen, draws, own)
        for i, leaf in enumerate(leaves):
            if i not in draws:
                if helds[i] is not None:
                    helds[i] = helds[i]._replace(residual=_lost(due[i], going[i]))
                continue
            if isinstance(self.sparsifier, base.Rounding):
                rounded = self.sparsifier.rounded(due[i], draws[i])
                if self.memory is not None:
                    rounded = rounded * self.sparsifier.shrink(due[i].size)
                rounded = rounded.astype(leaf.dtype)
                going[i] = rounded.reshape(leaf.shape)
                if helds[i] is not None:
                    helds[i] = helds[i]._replace(residual=_lost(due[i], rounded))
                continue
            going[i], helds[i] = self._taken(leaf, due[i], helds[i], found[i])
        return going, helds, own

    def _draw(self, step, name, size):
        """What a sparsifier may know; ranks agree on it without a message."""
        shards = wire.ranks(self.model_axis) if self.model_axis is not None else 1
        number = zlib.crc32(f"{self.seed} {name}".encode())
        seed = hashing.mix32(step.astype(jnp.uint32), number)
        wanted = self.sparsifier.wanted(size * shards, step)
        return base.Draw(step, seed, wanted, self.model_axis)

    def _places(self, paths, due, chosen, draws, own):
        """Where the selected elements of each leaf are."""
        sparsifier: Any = self.sparsifier
        if isinstance(sparsifier, base.Rounding) or not chosen:
            return {}
        found = {}
        if not self.global_:
            for i in chosen:
                room = sparsifier.capacity(due[i].size)
                found[i], own[paths[i]] = sparsifier.select(
                    due[i], own.get(paths[i], ()), draws[i], room
                )
            return found
        dtype = jnp.result_type(*(due[i].dtype for i in chosen))
        together = jnp.concatenate([due[i].astype(dtype) for i in chosen])
        draw = self._draw(draws[chosen[0]].step, "", together.size)
        level, own[""] = sparsifier.level(together, own.get("", ()), draw)
        level = sparsifier.settled(together, level, draw)
        count = jnp.int32(0)
        most = sparsifier.capacity(together.size)
        for i in chosen:
            size = due[i].size
            room = min(size, most, _UNEVEN * sparsifier.capacity(size))
            least = base.as_dtype(level, dtype, due[i].dtype)
            found[i], held = sparsifier.take(due[i], least, draws[i], room)
            count = count + held
        own[""] = sparsifier.after(own[""], draw.total(count), draw)
        return found

    def _taken(self, leaf, due, held, found):
        """A leaf's entries at these places, and what is held without them."""
        values = due.at[found].get(mode="fill", fill_value=0)
        sparsifier: Any = self.sparsifier
        if self.memory is None:
            values = values * sparsifier.scale(due.size)
        goes = values.astype(leaf.dtype)
        tensor = SparseTensor(found, goes, leaf.shape, shared=sparsifier.shared)
        if held is None or self.memory is None:
            return tensor, held
        # Where nothing is selected the place lies behind the end, each its own.
        spare = due.size + lax.iota(jnp.int32, found.size)
        apart = jnp.where(found < due.size, found, spare)
        left = _lost(values, goes)
        residual = due.at[apart].set(left, mode="drop", unique_indices=True)
        return tensor, self.memory.gone(held._replace(residual=residual), apart)


def _lost(due, goes):
    """What rounding takes; nothing of what is not finite, which would stay for ever."""
    goes = goes.reshape(-1)
    lost = due - goes.astype(due.dtype)
    return jnp.where(jnp.isfinite(lost), lost, 0)


def _nothing(x, bad):
    """A leaf of which nothing goes if something was bad."""
    if isinstance(x, SparseTensor):
        units = jnp.where(bad, x.units, x.indices)
        return dataclasses.replace(x, indices=units)
    return jnp.where(bad, jnp.zeros_like(x), x)


def _wide(dtype):
    return jnp.promote_types(dtype, jnp.float32)

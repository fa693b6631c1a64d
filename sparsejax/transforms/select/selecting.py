"""A sparsifier on a tree: selects entries of each leaf of the accumulated gradient.

On the wire: nothing, unless the shards of a tensor share a threshold (`model_axis`). A leaf
becomes a `SparseTensor` of the selected entries, which the exchange downstream sends
unchanged. Selected values are rounded to the gradient's dtype, or to a value code, and the
tensor then has the codes, too. The residual keeps the rounding errors and all elements that
were not selected.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hashing
from sparsejax import axes
from sparsejax.axes import AxisName, as_varying, varying_axes
from sparsejax.branches import hidden
from sparsejax.errors import ArgumentError
from sparsejax.sparsifiers import base
from sparsejax.state import observing, sharded, tree
from sparsejax.state.per_rank import PerRank, check_kind
from sparsejax.transforms import checks
from sparsejax.transforms.entry import Entry
from sparsejax.transforms.feedback import Accumulated, Outcome
from sparsejax.transforms.select.checks import check_shards, check_sizes, require_local
from sparsejax.units import bits
from sparsejax.units.selection import magnitudes, selections
from sparsejax.units.sparse_tensor import Origin, SparseTensor
from sparsejax.units.units import rounded, wide
from sparsejax.wire import value_codes
from sparsejax.wire.collectives import Wire


# If leaves, or shards, have one threshold together, one of them may have more large entries
# than its share: its capacity is this multiple of the share.
_UNEVEN = 8


class SelectState(NamedTuple):
    """State of a sparsifier on a tree.

    Attributes:
        step: int32: updates so far.
        sparsifiers: The sparsifier's state of each leaf, by path, as `PerRank`; with
            `global_` that of all leaves, under the empty path. None if it has no state.
        inside: float32: bytes that the last update sent over axes that are not the ranks',
            if it was entered under `jit`; else 0.
    """

    step: jax.Array
    sparsifiers: dict[str, PerRank] | None
    inside: jax.Array

    @classmethod
    def first(cls, sparsifiers: dict[str, PerRank] | None = None) -> "SelectState":
        """Returns the state before the first update."""
        return cls(jnp.int32(0), sparsifiers, jnp.float32(0))


@dataclasses.dataclass(frozen=True)
class Select:
    """Selects entries of each leaf; see `Lossy` for its methods, `sparsify` for the fields.

    Attributes:
        sparsifier: The algorithm that selects.
        axis_name: The mesh axis of the ranks.
        has_memory: Whether elements that are left out are added to later gradients; if
            not, values may be scaled so that their expectation is right.
        global_: Whether all leaves share one threshold.
        min_size: Smaller leaves are sent whole.
        compress: A function from a leaf's path and the leaf to whether it is sparsified.
        model_axis: The mesh axis over which tensors are sharded.
        seed: The seed of random selections.
        values: The code that selected values are rounded to; see `wire.value_codes`.
    """

    sparsifier: Any
    axis_name: AxisName | None
    has_memory: bool
    global_: bool
    min_size: int
    compress: Callable[[str, Any], bool] | None
    model_axis: AxisName | None
    seed: int
    values: str | None = None

    name = "a sparsejax sparsifier"
    takes_rows = False
    takes_weight = False

    @property
    def entry(self) -> Entry:
        """How its update is entered under `jit`; see `Lossy.entry`."""
        reads = self.sparsifier.reads_params
        options = {"sums": False, "model_axis": self.model_axis, "reads_params": reads}
        return Entry(self.name, self.axis_name, **options)

    def sparsifies(self, path: str, leaf: Any) -> bool:
        """Returns whether a leaf is sparsified; if not, it is sent whole."""
        if leaf.size < max(self.min_size, 1):
            return False
        return self.compress is None or bool(self.compress(path, leaf))

    def of_shard(self, path: str, node: Any, wire: Wire) -> Any:
        """Returns the gradient of a parameter sharded among the ranks, unchanged."""
        del path, wire
        return node

    def leaves_out(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[bool]:
        """Returns True for each leaf: one that is sent whole keeps its rounding error."""
        del paths
        return [True] * len(leaves)

    def init(self, params: Any) -> SelectState:
        """Returns the sparsifier's first states, which differ by rank."""
        paths, leaves, _ = tree.flatten(sharded.apart(params).rest)
        for path, leaf in zip(paths, leaves, strict=True):
            tree.check_dtype(path, leaf)
        if observing.is_observing():
            observing.report_sparsifier(self, paths, leaves)
            return SelectState.first()
        self._check_shards(paths, leaves)
        names = tree.distinct(paths)
        states = self._first_states(names, paths, leaves)
        if not jax.tree.leaves(states):
            return SelectState.first()
        why = "a sparsifier keeps on each rank what was not sent"
        wire = Wire(axes.resolve_for_state(self.axis_name, self.name, why))
        shards = axes.axis_names(self.model_axis) if self.model_axis else ()
        leaf_of = dict(zip(names, zip(paths, leaves, strict=True), strict=True))
        by_name = {}
        for name, state in states.items():
            members = [leaf_of[each] for each in (names if self.global_ else [name])]
            over = frozenset().union(*(varying_axes(leaf) for _, leaf in members))
            # The shards of a tensor share a threshold over `model_axis`, and one state.
            over -= frozenset(shards)
            typed = lambda x, over=over: as_varying(x[None], over)
            value = wire.per_rank(jax.tree.map(typed, state))
            of = tuple(path for path, _ in members)
            by_name[name] = PerRank(value, wire.axis, of, shards)
        return SelectState.first(by_name)

    def _first_states(self, names, paths, leaves):
        members = [
            (name, leaf)
            for name, path, leaf in zip(names, paths, leaves, strict=True)
            if self.sparsifies(path, leaf)
        ]
        if self.global_ and members:
            dtype = jnp.result_type(*(wide(leaf.dtype) for _, leaf in members))
            size = sum(leaf.size for _, leaf in members)
            return {"": self.sparsifier.init(size, dtype)}
        return {
            name: self.sparsifier.init(leaf.size, wide(leaf.dtype))
            for name, leaf in members
        }

    def check(
        self, paths: Sequence[str], leaves: Sequence[Any], state: Any, wire: Wire
    ) -> None:
        """Raises if gradients are summed or sparse already, or shardings are mixed."""
        check_kind(state, SelectState, self.name)
        checks.check_model_axis(self.model_axis, wire)
        for path, leaf in zip(paths, leaves, strict=True):
            tree.check_dtype(path, leaf)
            if tree.is_sparse(leaf):
                raise ArgumentError(
                    f"the gradient of {path!r} is sparsified already: two sparsifiers in "
                    "one chain would each keep what the other has sent. Use one of them."
                )
            require_local(path, leaf, wire)
        self._check_shards(paths, leaves)
        pairs = zip(paths, leaves, strict=True)
        sizes = {path: leaf.size for path, leaf in pairs if self.sparsifies(path, leaf)}
        check_sizes(sizes, self.global_)

    def _check_shards(self, paths, leaves):
        """Raises if leaves that share a threshold are sharded over different axes."""
        if self.global_:
            pairs = zip(paths, leaves, strict=True)
            over = [tree.shards_of(*pair) for pair in pairs if self.sparsifies(*pair)]
            check_shards(over, self.model_axis, "global_")

    def outline(self, paths: Sequence[str], leaves: Sequence[Any], wire: Wire) -> list[Any]:
        """Returns leaves with the types of those that `step` sends; see `Lossy.outline`."""
        del wire
        if isinstance(self.sparsifier, base.Rounding):
            return list(leaves)

        def one(path, leaf):
            if not self.sparsifies(path, leaf):
                return leaf
            room = self.sparsifier.capacity(leaf.size)
            indices = jnp.zeros(room, jnp.int32)
            values = jnp.full(room, jnp.sum(leaf), leaf.dtype)
            return self._tensor(values, indices, leaf)

        return [one(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]

    def step(self, given: Accumulated, state: SelectState, wire: Wire) -> Outcome:
        """Selects entries of each leaf; see `Lossy.step`."""
        paths, likes, params = given.paths, given.likes, given.params
        accumulated = [x.astype(wide(x.dtype)) for x in given.leaves]
        pairs = enumerate(zip(paths, likes, strict=True))
        chosen = [] if given.dense else [i for i, pair in pairs if self.sparsifies(*pair)]
        names = tree.distinct(paths)
        states = _unwrapped(state.sparsifiers)
        sizes = [accumulated[i].size for i in chosen]
        seeds = np.array([self._number(names[i]) for i in chosen], np.uint32)
        seeds = hidden(seeds, sizes, lambda: state.step)
        draws = {
            i: self._draw(state.step, seed, size, wire.rank)
            for i, seed, size in zip(chosen, seeds, sizes, strict=True)
        }
        if params is not None:
            draws = {i: d._replace(param=params[i].reshape(-1)) for i, d in draws.items()}
        flat = [x.reshape(-1) for x in accumulated]
        places = self._places(names, flat, chosen, draws, states)
        sent, left = [], []
        for i, x in enumerate(flat):
            if i in places:
                part = self._taken(x, places[i], draws[i], likes[i])
            else:
                part = self._rounded(x, draws.get(i), likes[i])
            sent.append(part[0])
            left.append(None if part[1] is None else part[1].reshape(likes[i].shape))
        kept = _wrapped(states, state.sparsifiers)
        entered = given.entered
        inside = jnp.float32(0.0 if entered is None else sum(entered.inside))
        after = SelectState(state.step + 1, kept, inside)
        return Outcome(sent, left, [i in places for i in range(len(flat))], after)

    def _rounded(self, x, draw, like):
        """Returns a leaf that is sent whole, and its residual.

        It is rounded to few bits if `draw` is given, else to the gradient's dtype alone.
        """
        few_bits = x
        if draw is not None:
            finite = jnp.isfinite(x)
            few_bits = self.sparsifier.rounded(jnp.where(finite, x, 0), draw)
            if self.has_memory:
                few_bits = few_bits * self.sparsifier.shrink(x.size * draw.over.count)
            # Elements that are not finite are sent unchanged; a norm excludes them.
            few_bits = jnp.where(finite & jnp.isfinite(few_bits), few_bits, x)
        sent = rounded(few_bits, like.dtype)
        left = tree.rounding_error(x, sent) if self.has_memory else None
        return sent.reshape(like.shape), left

    def _number(self, name):
        """Returns a number that differs by leaf, from which its seeds are drawn."""
        return zlib.crc32(f"{self.seed} {name}".encode())

    def _draw(self, step, number, size, rank):
        """Returns the `Draw` of a leaf; all of it but `rank` is equal on all ranks."""
        shards = self._shards()
        seed = hashing.mix32(step.astype(jnp.uint32), number)
        wanted = self.sparsifier.wanted(size * shards.count, step)
        return base.Draw(step, seed, wanted, rank, shards)

    def _shards(self):
        """Returns how to reduce over the shards of a leaf, along `model_axis`."""
        if self.model_axis is None:
            return magnitudes.WHOLE
        wire = Wire(self.model_axis)
        add = lambda x: wire.psum(wire.per_rank(x))[0]
        join = lambda x: wire.all_gather(wire.per_rank(x))[0].reshape(-1)
        return magnitudes.Shards(add, join, wire.ranks)

    def _places(self, names, leaves, chosen, draws, states):
        """Returns the selected places of each chosen leaf; updates `states` in place."""
        sparsifier = self.sparsifier
        if isinstance(sparsifier, base.Rounding) or not chosen:
            return {}
        if self.global_:
            return self._places_together(leaves, chosen, draws, states)
        places = {}
        for group in selections.groups([leaves[i] for i in chosen]):
            own = [chosen[at] for at in group]
            found, after = sparsifier.select_all(
                [leaves[i] for i in own],
                [states.get(names[i], ()) for i in own],
                [draws[i] for i in own],
                [self._room(leaves[i].size, draws[i]) for i in own],
            )
            places |= dict(zip(own, found, strict=True))
            states |= dict(zip([names[i] for i in own], after, strict=True))
        return places

    def _room(self, size, draw):
        """Returns the capacity for selected elements; one shard may have most of them."""
        room = self.sparsifier.capacity(size)
        if isinstance(self.sparsifier, base.ByMagnitude):
            room = min(size, min(_UNEVEN, draw.over.count) * room)
        return room

    def _places_together(self, leaves, chosen, draws, states):
        """Returns the selected places of each chosen leaf, by one threshold for all."""
        sparsifier = self.sparsifier
        dtype = jnp.result_type(*(leaves[i].dtype for i in chosen))
        together = jnp.concatenate([leaves[i].astype(dtype) for i in chosen])
        one = draws[chosen[0]]
        draw = self._draw(one.step, self._number(""), together.size, one.rank)
        level, states[""] = sparsifier.level(together, states.get("", ()), draw)
        level = sparsifier.settled(together, level, draw)
        places, count = {}, jnp.int32(0)
        most = sparsifier.capacity(together.size)
        for group in selections.groups([leaves[i] for i in chosen]):
            own = [chosen[at] for at in group]
            least = magnitudes.converted(level, dtype, leaves[own[0]].dtype)
            rooms = [
                min(leaves[i].size, most, _UNEVEN * sparsifier.capacity(leaves[i].size))
                for i in own
            ]
            found, counts = sparsifier.take_all(
                [leaves[i] for i in own],
                [least] * len(own),
                [draws[i]._replace(alone=False) for i in own],
                rooms,
            )
            places |= dict(zip(own, found, strict=True))
            count = count + jnp.sum(counts)
        states[""] = sparsifier.after(states[""], draw.over.add(count), draw)
        return places

    def _taken(self, x, places, draw, like):
        """Returns the entries of a leaf at these places, and its residual."""
        values = x.at[places].get(mode="fill", fill_value=0)
        if not self.has_memory:
            values = values * self.sparsifier.scale(x.size, draw)
        tensor = self._tensor(values, places, like)
        if not self.has_memory:
            return tensor, None
        apart = bits.unique_places(places, places < x.size, x.size)
        error = tree.rounding_error(values, tensor.values)
        return tensor, x.at[apart].set(error, mode="drop", unique_indices=True)

    def _tensor(self, values, places, like):
        """Returns the tensor of selected values, rounded to its dtype or to the code."""
        coded = None
        if self.values is None:
            values = rounded(values, like.dtype)
        else:
            real = places < like.size
            values, coded = value_codes.coded(values, real, self.values, like.dtype)
        entries = places, values, like.shape, self.sparsifier.shared
        return SparseTensor(*entries, Origin(places), distinct=True, coded=coded)


def _unwrapped(by_name):
    """Returns this rank's states of the sparsifier, by name."""
    mine = lambda state: jax.tree.map(lambda x: x[0], state.value)
    return {name: mine(state) for name, state in (by_name or {}).items()}


def _wrapped(states, before):
    """Returns the states as `PerRank`, like those of the last step."""
    if before is None:
        return None
    return {
        name: old.with_value(jax.tree.map(lambda x: x[None], states[name]))
        for name, old in before.items()
    }

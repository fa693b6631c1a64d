"""A lazy optimizer's state and parameters, table by table, and how to read them."""

import dataclasses
import enum
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pallas_kernels.types import same_trace
from sparsejax.axes import as_varying, further_axes
from sparsejax.errors import ArgumentError, AxisError, StateError
from sparsejax.rows import tiles
from sparsejax.rows.reads import Ids
from sparsejax.rows.updates import anatomy as anatomies
from sparsejax.rows.updates.catch_up import CatchUp, Rows
from sparsejax.rows.updates.fading import FadingSums, in_turn
from sparsejax.rows.updates.inside import Inside
from sparsejax.rows.updates.state import LazyState, find
from sparsejax.units.merging import Merge, merged
from sparsejax.units.row_grads import RowGrads


class Turn(enum.Enum):
    """Which rows a step lists besides those that have a gradient, as momenta fade.

    Rows of a step may come in two halves, of which the second is late. Whose turn it is
    comes with that one, since it may be among the rows that do.
    """

    NOW = "those whose turn it is"
    LATER = "none, since the rest of the step comes later"
    REST = "those whose turn it is, but for rows that have seen the step"


class View:
    """A state with the parameters that it belongs to, table by table.

    Args:
        inside: The optimizer.
        grads: The gradients, or what has their structure, shapes and dtypes.
        params: The parameters, or None.
        state: The state.
    """

    def __init__(self, inside: Inside, grads: Any, params: Any, state: LazyState):
        _, leaves, structure = anatomies.flatten(grads)
        if params is None:
            shapes = map(anatomies.as_array, leaves)
            self.anatomy = inside.anatomy(grads, jax.tree.unflatten(structure, shapes))
            self.leaves: list[Any] = [None] * len(leaves)
        else:
            self.anatomy = inside.anatomy(grads, params)
            self.leaves = structure.flatten_up_to(params)
        self.inner, self.of_state = jax.tree.flatten(state.inner)
        self.last = structure.flatten_up_to(state.last)
        self.step = state.step
        self.lagging = inside.lagging(self.anatomy)
        self.moving = {at for at in self.lagging if self.anatomy.tables[at].moves}
        if params is None and self.moving:
            path = self.anatomy.paths[min(self.moving)]
            raise ArgumentError(
                f"lazy: update needs the parameters, because rows of {path!r} catch up on "
                "steps that they have missed: tx.update(grads, state, params)."
            )
        next_step = state.step + 1
        held = [self.inner[j] for j in self.anatomy.held] if self.lagging else []
        self.history = state.history.noted(next_step, held)
        self.shapes = tuple(anatomies.shapes(leaves if params is None else self.leaves))
        self._catch_up = CatchUp(
            inside.tx,
            self.anatomy,
            (structure, self.of_state),
            self.shapes,
            tuple(self.inner),
            self.history,
            state.step,
            {},
        )
        self._state = state
        sums = self._sums(inside, state)
        self._catch_up = dataclasses.replace(self._catch_up, sums=sums)

    def _sums(self, inside, state):
        """The sums by which rows move: those that a reader of the same state has made."""
        movings = inside.movings(self.anatomy)
        if len(state.kept) != len(movings):
            raise StateError(
                f"lazy: this state keeps the sums of {len(state.kept)} kinds of rows that "
                f"move, and {len(movings)} are needed: it was saved by another version or "
                "for another optimizer. Start from tx.init(params); or settle it with the "
                "version that has saved it, and take "
                "state._replace(kept=tx.init(params).kept) of what that returns."
            )
        for reader in list(inside.readers):
            made = reader.sums_of(self)
            if made is not None:
                return made
        return {
            number: table.fading.sums(
                state.kept[number], state.step, self._catch_up.probe(table.leaf)
            )
            for number, table in movings.items()
            if table.fading is not None
        }

    def sums_of(self, other: "View") -> dict[int, FadingSums] | None:
        """The sums by which rows move, if another view is one of the same state."""
        sums = self._catch_up.sums
        if not sums or not _are(self._numbers(), other._numbers()):
            return None
        traced = all(same_trace(made.recent, self.step) for made in sums.values())
        return dict(sums) if traced else None

    def _numbers(self):
        """What the sums by which rows move depend on."""
        pairs = zip(self.inner, self.anatomy.owner, strict=True)
        return [self.step, *(x for x, k in pairs if k is None), *self._state.kept]

    def kept(self) -> tuple[jax.Array, ...]:
        """What is kept of the sums by which rows move, after a step."""
        pairs = enumerate(self._state.kept)
        sums = self._catch_up.sums
        return tuple(sums[k].kept if k in sums else kept for k, kept in pairs)

    def catch_up(self, rows: dict[int, Rows], one_by_one: bool = False) -> dict[int, Rows]:
        """Rows of some tables as after the last step, as `CatchUp` has them."""
        return self._catch_up(rows, one_by_one) if rows else {}

    def gathered(self, whole: Rows, ids: jax.Array) -> Rows:
        """Rows of a table, the nearest for ids out of range; none of these is late."""
        own = tuple(gathered_rows(x, ids) for x in whole.own)
        param: Any = whole.param
        param = param if param is None else gathered_rows(param, ids)
        return Rows(param, own, self.seen(whole.last, ids))

    def seen(self, last: Any, ids: jax.Array) -> jax.Array:
        """The steps that rows of a table have seen last."""
        if isinstance(last, optax.MaskedNode):
            return jnp.zeros(ids.shape, jnp.int32)
        inside = (ids >= 0) & (ids < last.shape[0])
        return jnp.where(inside, gathered_rows(last, ids), self.step)

    def merged(self, at: int, ids: jax.Array, turn: Turn = Turn.NOW) -> Merge:
        """The distinct rows of a list, with those that this step lists besides.

        Args:
            at: The table.
            ids: int32 [n]; the places are of these.
            turn: Which rows it lists besides.
        """
        height = self.shapes[at].shape[0]
        more = []
        if self.is_fading(at) and turn is not Turn.LATER:
            ids_in_turn = in_turn(height, self.step)
            if turn is Turn.REST:
                seen = self.seen(self.last[at], ids_in_turn) > self.step
                ids_in_turn = jnp.where(seen, height, ids_in_turn)
            more = as_varying(
                [ids_in_turn], tiles.axes_of(ids_in_turn) | tiles.axes_of(ids)
            )
        every = jnp.concatenate([ids, *more])
        if not every.size:
            return Merge(every, every, jnp.int32(0))
        merge = merged(every, height, tiles.room(every.size))
        return merge._replace(places=merge.places[: ids.size])

    def caught_up(self, at: int, merge: Merge) -> Rows:
        """Listed rows of a table that moves, as after the last step.

        Of rows whose momentum fades just the parameter, for a loss: what an update needs
        of them it computes again, where it has their state at hand. Of others all, so that
        no step is taken twice.
        """
        whole, ids = self.all_of(at), merge.ids
        types = tiles.axes_of(whole, ids, self.step, self._catch_up.sums)

        def late(ids, apart=lambda run: run()):
            rows = self.now(at, apart(lambda: self.gathered(whole, ids)))
            return rows._replace(own=(), last=()) if self.is_fading(at) else rows

        n = ids.shape[0]
        number = tiles.tiles_of(n * max(1, whole.param[:1].size)) if tiles.is_long(n) else 1
        if number == 1:
            return late(ids)

        def one(tile, made):
            return tile.put(at, made, late(tile.cut(at, ids), tile.apart))

        shapes = jax.eval_shape(late, ids)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return tiles.each({at: (n, merge.found)}, number, one, empty, types)

    def is_fading(self, at: int) -> bool:
        """Whether all steps that rows of a table have missed are one sum."""
        return self.anatomy.tables[at].fading is not None

    def now(self, at: int, rows: Rows) -> Rows:
        """Rows of a table as after the last step, late or not."""
        if self.is_fading(at) and rows.last.size:
            return self._catch_up.faded(at, rows)
        return self.catch_up({at: rows})[at] if at in self.lagging else rows

    def is_same(self, other: "View", at: int) -> bool:
        """Whether rows of a table are equally late, seen from here and from there."""
        ours, theirs = (
            jax.tree.leaves((x.leaves[at], x.last[at], x.step, x.inner, x.history.values))
            for x in (self, other)
        )
        return _are(ours, theirs)

    def inner_with(self, rows: dict[int, Rows]) -> list[Any]:
        """The leaves of the state, those that have rows of some tables replaced."""
        inner = list(self.inner)
        for at, part in rows.items():
            for j, own in zip(self.anatomy.tables[at].own, part.own, strict=True):
                inner[j] = own
        return inner

    def all_of(self, at: int) -> Rows:
        """All rows of a table."""
        own = tuple(self.inner[j] for j in self.anatomy.tables[at].own)
        return Rows(self.leaves[at], own, self.last[at])


class ReadRows(NamedTuple):
    """Rows that a loss has read.

    Attributes:
        ids: Those that the gradient lists.
        merge: The distinct rows that were read, and the place of each of `ids`.
        rows: These, caught up: see `View.caught_up`.
    """

    ids: jax.Array
    merge: Merge
    rows: Rows


class LateRowReader:
    """Rows as the dense optimizer has them, from tables some of whose rows are late.

    It remembers what it has caught up, and by which sums, for the update of the same state
    that lists just these rows. What an update does is the same where it finds none of it.

    Args:
        inside: The optimizer.
        params: The parameters.
        state: Its state, or that of a chain that it is in.
    """

    def __init__(self, inside: Inside, params: Any, state: Any):
        names, leaves, _ = anatomies.flatten(params)
        self._leaves = dict(zip(names, leaves, strict=True))
        state = find(state)
        params = inside.those_of(params, state.inner)
        paths, _, _ = anatomies.flatten(params)
        self._numbers = {path: at for at, path in enumerate(paths)}
        self._view = View(inside, params, params, state)
        if self._view.moving:
            _check_axes()
        self._readings: list[ReadRows] = []
        self._listed: dict[int, tuple[jax.Array, ReadRows]] = {}
        inside.readers.add(self)

    def rows(self, path: str, ids: Ids) -> jax.Array:
        """Rows of a table.

        Args:
            path: Of the table among the parameters.
            ids: Of any shape; the nearest row is returned for `ids.read` out of range.

        Returns:
            [*ids.read.shape, ...].
        """
        at, read = self._numbers.get(path), ids.read
        if at is None or at not in self._view.moving or not read.size:
            return gathered_rows(self._leaves[path], read)
        merge = self._view.merged(at, read.reshape(-1))
        rows = self._view.caught_up(at, merge)
        # A row that was read for an id out of range is in the list, with no gradient: a
        # step of zero, which an exact optimizer takes of all rows.
        is_listed = ids.listed.reshape(-1) < self._view.shapes[at].shape[0]
        places = jnp.where(is_listed, merge.places, merge.ids.shape[0])
        reading = ReadRows(ids.listed, merge._replace(places=places), rows)
        self._readings.append(reading)
        return gathered_rows(rows.param, merge.places.reshape(read.shape))

    def listed(self, path: str, ids: list[jax.Array], grads: RowGrads) -> None:
        """Notes what the gradient of a table lists: the rows of some calls of `rows`."""
        found = [reading for reading in self._readings if reading.ids is ids[0]]
        if len(ids) == len(found) == 1:
            self._listed[self._numbers[path]] = grads.ids, found[0]

    def reading(self, view: View, at: int, ids: jax.Array) -> ReadRows | None:
        """What was read of a table, if that is what an update of it needs."""
        known, reading = self._listed.get(at, (None, None))
        if reading is None or known is not ids or not view.is_same(self._view, at):
            return None
        return reading if same_trace(reading.rows.param, ids) else None

    def sums_of(self, view: View) -> dict[int, FadingSums] | None:
        """The sums by which rows move, if they are those of another view, too."""
        return self._view.sums_of(view)

    def whole(self, paths: Sequence[str]) -> list[jax.Array]:
        """Some parameters, all of them."""
        wanted = [self._numbers.get(path) for path in paths]
        tables = [at for at in wanted if at is not None and at in self._view.moving]
        every = {at: self._view.all_of(at) for at in tables}
        settled = self._view.catch_up(every, one_by_one=True)
        return [
            self._leaves[path] if at is None or at not in settled else settled[at].param
            for path, at in zip(paths, wanted, strict=True)
        ]


def _check_axes():
    """Raises where XLA may shard a table from which each rank reads rows by itself."""
    further = further_axes()
    if further:
        raise AxisError(
            "lazy: each rank catches up the rows that it reads, in loops of its own "
            f"length, and {further[0]!r} is no manual axis here (axis_names of "
            "jax.shard_map leaves it out): where XLA shards a table over it, ranks would "
            "wait for one another. Make all axes manual, by leaving axis_names out, or "
            "take exact=False."
        )


def gathered_rows(x: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of an array; the nearest one for an id that is out of range."""
    return jnp.take(x, ids, axis=0, mode="clip")


def _are(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether two lists hold the same arrays, not only equal ones."""
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))

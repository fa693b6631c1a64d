"""`sparsejax.restore`."""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.checkpoints import folders, reading, records, together
from sparsejax.checkpoints.comparing import first_difference
from sparsejax.checkpoints.description import (
    HELD,
    VALUES,
    Array,
    Part,
    Value,
    arrays_of,
    children,
    described,
    is_key,
    joined,
    leaves,
    ranks_of,
)
from sparsejax.checkpoints.resizing import resized
from sparsejax.errors import ArgumentError, CheckpointError
from sparsejax.state import tree
from sparsejax.state.per_rank import find
from sparsejax.transforms.exchange import ExchangeState


def restore(
    path: str | os.PathLike[str],
    like: Any,
    *,
    about: records.About | None = None,
    reduce: str | None = None,
) -> Any:
    """Reads a state that `sparsejax.save` has written, and places it on the current mesh.

    On the number of ranks that saved it, each device reads its own part, and training
    continues as if it had not ended. (With `sparsejax.embrace_sync` delayed rows are
    applied before the first step, which gives the same numbers up to rounding.) On another
    number of ranks `sparsejax.resized` distributes the state by rank. In a job of several
    processes all call it, and if one of them cannot read its part, or reads another
    checkpoint, all raise.

    Args:
        path: The folder of the checkpoint.
        like: A new state for the mesh, of the same parameters and optimizer:
            `trainer.init(params)`, or a tree with `sparsejax.init(tx, params, mesh)` in it.
            It says where the arrays of the checkpoint are placed; its values are not used.
            On the same number of ranks `sparsejax.abstract_state` is enough.
        about: What the state should belong to, to be compared with the `about` of `save`.
        reduce: See `sparsejax.resized`, which rarely needs it.

    Returns:
        The state, placed as `like` is.

    Raises:
        CheckpointError: There is no checkpoint, or it is incomplete, of another format, or
            of another model, transformation or run; no array was read. Or its arrays are
            damaged, or processes restore different checkpoints. All processes raise it if
            one does.
        JobError: Another process does not call `restore`, or does not say whether it could
            read its part, within an hour. What is waited for is printed after a minute.

    Example:
        >>> opt_state = sparsejax.init(tx, params, mesh)  # on these ranks
        >>> like = {"params": params, "opt_state": opt_state}
        >>> sparsejax.save("run/1000", like)  # on these, or on others
        >>> restored = sparsejax.restore("run/1000", like)

    See Also:
        `sparsejax.save`: writes it.
        `sparsejax.resized`: changes the number of ranks of a state in memory.
        `sparsejax.abstract_state`: a target for checkpoints of orbax's own.
    """
    together.all_call("sparsejax.restore")
    read = lambda: _read(path, like, about)
    places, found, resizing, folder, own = together.on_all("whether it can restore", read)
    same = together.Same(
        "the checkpoint to restore",
        own,
        f"{folder} (of hash {own})",
        "Give all processes the same one: where it is the newest that a process finds, let "
        "process 0 look, and send its number to the others.",
    )
    together.check_equal(same)
    return _put_together(like, places, found, resizing, reduce)


def _read(path, like, about):
    """Reads this process's part.

    Returns:
        The parts of the state, the arrays that were read, whether to resize, the folder,
        and what identifies the checkpoint.
    """
    folder, record = folders.description(folders.folder_of(path))
    if about is not None:
        _check_about(records.check_about(about), record.about, folder)
    fresh, arrays = described(like)
    tree.check_not_donated(like, "sparsejax.restore", ", or with trainer.init(params)")
    here = ranks_of(like)
    resizing = record.ranks.differ_from(here)
    _check_same(record, fresh, here, resizing, folder, find(like, HELD))
    if resizing and any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
        raise ArgumentError(
            f"the checkpoint in {folder} is of {record.ranks.number} ranks, and `like` of "
            f"{here.number}: then it must have its arrays, as trainer.init(params) and "
            "sparsejax.init(tx, params, mesh) make them, and not their shapes alone."
        )
    places = list(_places(record.tree, like, resizing))
    wanted = {number: at for place in places for number, at in place.wanted().items()}
    found = reading.read(folder, arrays_of(record.tree), wanted)
    own = folders.identity(folder) if jax.process_count() > 1 else ""
    return places, found, resizing, folder, own


def _check_about(here, there, folder):
    """Raises if the `about` of the checkpoint differs from that of this run."""
    for name in [*here, *there]:
        if name in here and name in there and here[name] == there[name]:
            continue
        was = f"it has no about[{name!r}]"
        if name in there:
            was = f"of {name} it has {there[name]}"
        now = here.get(name, "none")
        raise CheckpointError(
            f"the checkpoint in {folder} is of another run: {was}, and this run has {now}."
        )


def _check_same(record, fresh, here, resizing, folder, held):
    """Raises if a checkpoint is of another model or transformation."""
    found = first_difference(record.tree, fresh, resizing)
    if found is None:
        return
    ranks = ""
    fix = "Make `like` with the parameters and the transformation that were saved"
    fix = found.fix or f"{fix}, and shard the parameters as they were."
    if resizing:
        ranks = f" It is of {record.ranks.number} ranks, and here are {here.number}"
        # For example, nnx.state puts the nodes that tx made into its own containers.
        none = (
            ", and nothing in `like` says by its type what ranks hold: save and restore "
            "what sparsejax.init(tx, params, mesh) made, with flax.nnx "
            "nnx.as_pure(optimizer.opt_state)."
        )
        ranks += "." if held else none
    raise CheckpointError(
        f"the checkpoint in {folder} is of another model, of another transformation, or of "
        f"other options of it, than `like`: at {found.path!r} it has {found.saved}, and "
        f"`like` has {found.fresh}. {fix} It was written by sparsejax "
        f"{record.versions['sparsejax']} with JAX {record.versions['jax']}.{ranks}"
    )


class _StatePart(NamedTuple):
    """A part of a state: a leaf, or a node that is resized as a whole.

    Attributes:
        path: Its path.
        saved: Its description in the checkpoint.
        like: The same part of the fresh state.
        is_held: Whether it is a node to be resized.
    """

    path: str
    saved: Part
    like: Any
    is_held: bool

    def wanted(self) -> dict[int, Any]:
        """Returns its arrays' shardings by number; None for an array to read whole."""
        if not self.is_held:
            of_leaf = getattr(self.saved, "number", None)
            return {} if of_leaf is None else {of_leaf: _sharding(self.like)}
        return {x.number: None for x in self._arrays() if x.number is not None}

    def _arrays(self):
        saved: Any = self.saved
        if isinstance(self.like, ExchangeState):
            saved = saved.parts["totals"]  # the states of schemes are the fresh ones
        return [part for _, part in leaves(saved) if isinstance(part, Array)]

    def whole(self, found: dict[int, Any]) -> Any:
        """Returns the node with the whole arrays of all ranks."""
        of: Any = self.like.totals if isinstance(self.like, ExchangeState) else self.like
        fresh, structure = jax.tree.flatten(of)
        pairs = zip(self._arrays(), fresh, strict=True)
        node = structure.unflatten([_whole(x, y, found) for x, y in pairs])
        if isinstance(self.like, ExchangeState):
            return self.like._replace(totals=node)
        return node

    def leaf(self, found: dict[int, Any]) -> Any:
        """Returns the leaf, of the fresh one's type and placed as it is."""
        if type(self.like) not in VALUES:
            return _leaf(self.saved, self.like, found)
        saved: Any = self.saved
        is_value = isinstance(saved, Value)
        return saved.value if is_value else found[saved.number].item()


def _places(saved: Any, like: Any, resizing: bool, path: str = "") -> Iterator[_StatePart]:
    """Yields the parts of a state, in its order."""
    parts = children(like)
    is_held = resizing and isinstance(like, HELD)
    if parts is None or is_held:
        yield _StatePart(path, saved, like, is_held)
        return
    for name, child in parts:
        yield from _places(saved.parts.get(name), child, resizing, joined(path, name))


def _sharding(like):
    """Returns the sharding to restore an array with; None for one that is not committed."""
    if isinstance(like, jax.ShapeDtypeStruct):
        return like.sharding
    # An uncommitted array moves to the devices of its operands, and must remain so.
    if not isinstance(like, jax.Array) or not like.committed:
        return None
    return jax.random.key_data(like).sharding if is_key(like) else like.sharding


def _numbers(saved, found, dtype):
    if isinstance(saved, Value):
        return np.asarray(saved.value, dtype)
    if saved.number is None:
        return np.zeros(saved.shape, dtype)
    return found[saved.number]


def _whole(saved, like, found):
    """What all ranks held of a leaf, in the dtype that it had."""
    x = _numbers(saved, found, like.dtype)
    if not is_key(like):
        return x
    return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(like))


def _leaf(saved, like, found):
    if is_key(like) and saved.number is None:
        return like  # an array without elements
    x = _numbers(saved, found, like.dtype)
    if isinstance(like, np.ndarray | np.generic):
        return x[()] if isinstance(like, np.generic) else x
    place = _sharding(like)
    if place is None:
        x = jnp.asarray(x)
    elif not isinstance(x, jax.Array):  # it has no elements, or was a number of Python's
        numbers = x
        x = jax.make_array_from_callback(x.shape, place, lambda at: numbers[at])
    if not is_key(like):
        return x
    impl = jax.random.key_impl(like) if isinstance(like, jax.Array) else saved.impl
    return jax.random.wrap_key_data(x, impl=impl)


def _put_together(like, places, found, resizing, reduce):
    """Returns the state, made of its leaves and of the nodes that are resized."""
    names = tree.distinct([place.path for place in places])
    held = {name: place for name, place in zip(names, places, strict=True) if place.is_held}
    moved = {}
    if held:
        old = {name: place.whole(found) for name, place in held.items()}
        fresh = {name: place.like for name, place in held.items()}
        moved = resized(old, like=fresh, reduce=reduce)
    is_leaf = lambda x: resizing and isinstance(x, HELD)
    structure = jax.tree.structure(like, is_leaf=is_leaf)
    done = zip(names, places, strict=True)
    return structure.unflatten(
        [moved[name] if place.is_held else place.leaf(found) for name, place in done]
    )

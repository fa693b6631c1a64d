"""The exchange of the largest entries of each block: one message a rank, of one size.

On the wire: one all-gather of a `message.RankMessage`, whose bytes follow from shapes. A
rank sends its message n - 1 times, at any number n of ranks, and receives as many. Leaves
that vary over other mesh axes than the rest go in a message of their own, since what is the
same on all shards has to stay so. With weights a message is one word longer.

What a rank sends of a leaf is what its message says, after rounding: so for the accumulated
value e' of a rank and the weight, or the number, W of the ranks that an element is divided
by,

    sent + left == e'        e' = decay * left before + gradient
    W * total == sum over ranks of weight * sent

Where the sum is clipped at the median norm, `sent` is what is left of the message, and the
rest stays with the sender. A rank of weight 0 has sent nothing: all stays with it, but for
what is not finite, which it would send once its weight is another.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import axes
from sparsejax.axes import AxisName
from sparsejax.chunked import blocks, dct
from sparsejax.chunked.aggregate import Aggregate, clipping
from sparsejax.chunked.forecast import Chunks
from sparsejax.chunked.message import RankMessage, message_bytes
from sparsejax.errors import ArgumentError
from sparsejax.schemes.base import no_traffic, stage, traffic
from sparsejax.state import finite, observing, sharded, tree
from sparsejax.state.per_rank import check_kind
from sparsejax.state.totals import Totals
from sparsejax.state.weights import own_weight
from sparsejax.transforms.buckets import Bucket, Everything
from sparsejax.transforms.checks import Leaves
from sparsejax.transforms.entry import Entry, LeafPlaces, Reduction
from sparsejax.transforms.exchange import ExchangeState
from sparsejax.transforms.feedback import Outcome
from sparsejax.wire import Wire
from sparsejax.wire.value_codes import code_of


_NAME = "chunks"  # of all leaves, in metrics


@dataclasses.dataclass(frozen=True)
class ChunkedExchange:
    """Sends the largest entries of each block; see `Lossy` for its methods.

    Attributes:
        axis_name: The mesh axis of the ranks; the only manual one if None.
        k: Entries of a whole block.
        chunk: Numbers in a whole block.
        values: How values travel.
        senders: Whether an element is divided by the ranks that sent it; else by all.
        mean: Whether the result is the mean; else that times the number of ranks.
        clip_to_median: Whether a rank's part of a leaf is scaled to the median norm.
        cosines: Whether the entries are the cosine coefficients of a block; see `dct`.
    """

    axis_name: AxisName | None = None
    k: int = 64
    chunk: int = 4096
    values: str = "2bit"
    senders: bool = True
    mean: bool = True
    clip_to_median: bool = False
    cosines: bool = False

    name = "sparsejax.chunked_sync"
    takes_rows = False
    takes_weight = True

    @property
    def entry(self) -> Entry:
        """How its update is entered under `jit`; see `Lossy.entry`."""
        return Entry(self.name, self.axis_name)

    @property
    def assignment(self) -> Everything:
        """How each leaf is summed, for forecasts."""
        return Everything(Chunks())

    def init(self, params: Any) -> ExchangeState | None:
        """The first state: it holds what was sent."""
        shards = sharded.apart(params)
        paths, leaves, _ = tree.flatten(shards.rest, self.name)
        for path, leaf in zip(paths, leaves, strict=True):
            tree.check_dtype(path, leaf)
            blocks.check_size(path, leaf.shape)
        if observing.is_observing():
            buckets = [self._bucket(paths, leaves)] if leaves else []
            own = sharded.paths_of(params)
            observing.report_exchange(self, paths, leaves, buckets, own)
            return None
        sums = finite.first_sums(paths, [leaf.dtype for leaf in leaves])
        made_for = Reduction(self.mean), Leaves.of(paths, leaves)
        counts = {_NAME: no_traffic().as_one()}
        return ExchangeState({}, counts, Totals.zero(), *made_for, sums)

    def _bucket(self, paths, leaves):
        """All leaves as one bucket, for forecasts."""
        sizes = tuple(leaf.size for leaf in leaves)
        shapes = [leaf.shape for leaf in leaves]
        sent = message_bytes(shapes, self.k, self.chunk, self.values)
        scheme = Chunks(sent, self._message(shapes).entries / max(sum(sizes), 1))
        return Bucket(_NAME, scheme, tuple(range(len(paths))), tuple(paths), sizes, ())

    def _message(self, shapes):
        return RankMessage.of(shapes, self.k, self.chunk, code_of(self.values))

    def of_shard(self, path: str, node: Any, wire: Wire) -> Any:
        """The gradient of a part that each rank has whole; see `Lossy.of_shard`."""
        return sharded.synchronized(path, node, wire, self.mean)

    def leaves_out(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[bool]:
        """True for each leaf."""
        del paths
        return [True] * len(leaves)

    def check(
        self, paths: Sequence[str], leaves: Sequence[Any], state: Any, wire: Wire
    ) -> None:
        """Raises where gradients are summed, or sparse, or the state is of other leaves."""
        for path, leaf in zip(paths, leaves, strict=True):
            axes.require_local(path, tree.numbers(leaf), wire.axis)
            if tree.is_sparse(leaf):
                raise ArgumentError(
                    f"the gradient of {path!r} is sparse already, and {self.name} selects "
                    "entries by itself: leave the sparsifier out, or take a lossless "
                    "synchronization, such as sparsejax.zen_sync()."
                )
            tree.check_dtype(path, leaf)
        check_kind(state, ExchangeState, self.name)
        state.leaves.check(paths, leaves, wire)

    def outline(
        self, paths: Sequence[str], leaves: Sequence[Any], wire: Wire
    ) -> list[jax.Array]:
        """Leaves of the types of the results; see `Lossy.outline`."""
        del paths
        return [wire.assume_same(leaf) for leaf in leaves]

    def step(
        self,
        paths: Sequence[str],
        accumulated: Sequence[jax.Array],
        state: ExchangeState,
        wire: Wire,
        *,
        dtypes: Sequence[Any],
        dense: bool = False,
        weight: Any = None,
        entered: LeafPlaces | None = None,
        **extra: Any,
    ) -> Outcome:
        """Sends the largest entries; see `Lossy.step`.

        Args:
            paths: The leaves' paths.
            accumulated: The leaves, float32 or wider.
            state: The state.
            wire: The ranks.
            dtypes: Of the results.
            dense: Whether everything is sent, by an all-reduce.
            weight: This rank's weight, or [ranks] all of them; None for 1.
            entered: What is known of the leaves where the update was entered.
            **extra: Unused.
        """
        del extra
        _check_scatter(self.name, paths, entered)
        own = None if weight is None else own_weight(weight, wire)
        summed: list[Any] = [None] * len(accumulated)
        left: list[Any] = list(summed)
        sent, kept, size = 0.0, 0, max(sum(x.size for x in accumulated), 1)
        for places in _by_types(accumulated):
            leaves = [accumulated[i] for i in places]
            message = self._message([x.shape for x in leaves])
            selected = self._coefficients if self.cosines else self._largest
            exchanged = self._all if dense else selected
            totals, rest, cost = exchanged(message, leaves, own, wire)
            sent, kept = sent + cost, kept + message.entries
            for i, total, x in zip(places, totals, rest, strict=True):
                summed[i], left[i] = total.astype(dtypes[i]), x
        pairs = zip(accumulated, dtypes, strict=True)
        dense_bytes = sum(wire.dense_bytes(x.size, dtype) for x, dtype in pairs)
        share = 1.0 if dense else kept / size
        counts = traffic(
            stage(sent, sent, 1),
            stage(),
            dense=dense_bytes,
            before=share,
            after=min(1.0, share * wire.ranks),
            inside=0.0 if entered is None else sum(entered.inside),
        )
        sums = None if state.sums is None else state.sums.after(summed, wire)
        after = {"traffic": {_NAME: counts.as_one()}, "sums": sums}
        after = state._replace(totals=state.totals.plus([counts]), **after)
        return Outcome(summed, left, [not dense] * len(summed), after)

    def _largest(self, message, leaves, weight, wire):
        """The totals of some leaves, what is left of them, and the bytes sent."""
        words, own = message.pack([x.astype(jnp.float32) for x in leaves])
        if weight is not None:
            word = lax.bitcast_convert_type(weight, jnp.uint32)[None]
            words = jnp.concatenate([words, word])
        words, sent = wire.all_gather(words)
        weights = scales = None
        if weight is not None:
            words, last = words[:, :-1], words[:, -1]
            weights = lax.bitcast_convert_type(last, jnp.float32)
        if self.clip_to_median and leaves:
            scales = clipping(message, words, weights)
        aggregate = Aggregate(message, wire.ranks, self.senders, self.mean)
        totals = aggregate(words, weights, scales)
        mine = None if scales is None else wire.per_rank(scales)[wire.rank]
        left = []
        for i, (x, selected) in enumerate(zip(leaves, own, strict=True)):
            sent_values = selected.values if mine is None else selected.values * mine[i]
            left.append(_left(x, selected.indices, sent_values, weight))
        shaped = [total.reshape(x.shape) for total, x in zip(totals, leaves, strict=True)]
        return shaped, left, sent

    def _coefficients(self, message, leaves, weight, wire):
        """As `_largest`, of the cosine coefficients of each block."""
        pairs = list(zip(message.cuts, leaves, strict=True))
        given = [dct.forward(cut, x) for cut, x in pairs]
        totals, rest, cost = self._largest(message, given, weight, wire)
        left = []
        for (cut, x), before, after in zip(pairs, given, rest, strict=True):
            # What was sent, not what is left: rounding of both ways is no residual then.
            own = tree.rounding_error(x, dct.inverse(cut, before - after))
            silent = None if weight is None else _kept(x, weight)
            left.append(own if silent is None else jnp.where(weight == 0, silent, own))
        back = [dct.inverse(*pair) for pair in zip(message.cuts, totals, strict=True)]
        return back, left, cost

    def _all(self, message, leaves, weight, wire):
        """As `_largest`, of everything."""
        del message
        flat = jnp.concatenate([x.reshape(-1).astype(jnp.float32) for x in leaves])
        if weight is not None:
            flat = jnp.where(weight == 0, 0, weight * flat)
            flat = jnp.concatenate([flat, weight[None]])
        total, sent = wire.all_reduce(flat)
        divisor = wire.ranks
        if weight is not None:
            total, divisor = total[:-1], jnp.where(total[-1] == 0, 1, total[-1])
        total = total / divisor if self.mean else total / divisor * wire.ranks
        sizes = [x.size for x in leaves]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        pairs = list(zip(leaves, ends, strict=True))
        parts = [total[end - x.size : end].reshape(x.shape) for x, end in pairs]
        silent = lambda x: jnp.zeros_like(x) if weight is None else _kept(x, weight)
        return parts, list(map(silent, leaves)), sent


def _left(x, at, values, weight):
    """A leaf without what was sent of it; all that is finite where its weight is 0."""
    flat = x.reshape(-1)
    before = flat.at[at].get(mode="promise_in_bounds")
    after = tree.rounding_error(before, values)
    if weight is not None:
        after = jnp.where(weight == 0, before, after)
    flat = flat.at[at].set(after, mode="promise_in_bounds", unique_indices=True)
    if weight is not None:
        flat = jnp.where((weight == 0) & ~jnp.isfinite(flat), 0, flat)
    return flat.reshape(x.shape)


def _kept(x, weight):
    """What a rank keeps where everything is sent: all that is finite if its weight is 0."""
    return jnp.where((weight == 0) & jnp.isfinite(x), x, 0)


def _by_types(leaves):
    """The numbers of leaves that vary over the same mesh axes, list by list."""
    found: dict[frozenset[str], list[int]] = {}
    for i, leaf in enumerate(leaves):
        found.setdefault(tree.axes_of(leaf), []).append(i)
    return list(found.values())


def _check_scatter(name, paths, entered):
    """Raises where a parameter is sharded over the axis of the ranks itself."""
    scatter = entered.scatter if entered is not None else ()
    for path, at in zip(paths, scatter, strict=False):
        if at is not None:
            raise ArgumentError(
                f"leaf {path!r} is sharded over the axis of the ranks in its dimension "
                f"{at}, and {name} sends what all ranks have whole: shard it over another "
                "mesh axis, as fsdp of (replica, fsdp), or take sparsejax.zen_sync()."
            )

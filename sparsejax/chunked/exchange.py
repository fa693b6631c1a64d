"""The exchange of the largest entries of each block, by messages of constant size.

On the wire, up to eight ranks: one all-gather of a `message.RankMessage`, whose bytes
follow from shapes. A rank sends its message n - 1 times, and receives as many. Above eight
ranks each owns blocks (`owners`): one all-to-all of the pieces of that message, then one
all-gather of the largest entries of each owner's sums. A rank then sends about one message
and one of sums, at any number of ranks, and receives as much. Leaves that vary over
different mesh axes go in different messages, since what is equal on all shards must stay
so. With weights a message, or a piece, is one word longer.

`sent` are the values of a rank's message, after rounding. With the accumulated value e' of
a rank, and the total weight W, or the number, of the ranks by which an element is divided,

    sent + left == e'        e' = decay * left before + gradient
    W * total == sum over ranks of weight * sent

Without owners `total` is the result. With them an owner adds the values that it held back
of its blocks, and sends a part of the sum, rounded as well. With `returned` the result,

    returned + held == decay * held before + total

So over any number of rounds, with a decay of 1, the sum of all totals equals the sum of all
results plus the values that owners hold back, and the sum of all gradients equals the sum
of all values that ranks have sent plus those that they hold back.

If messages are clipped to the median norm, `sent` are the clipped values, and the rest
stays with the sender. A rank of weight 0 has sent nothing, and keeps everything except
values that are not finite, which it would otherwise send once its weight is non-zero.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import axes
from sparsejax.axes import AxisName
from sparsejax.chunked import blocks, dct, weights
from sparsejax.chunked.aggregate import Aggregate, clipping
from sparsejax.chunked.forecast import Chunks, Cost
from sparsejax.chunked.message import RankMessage
from sparsejax.chunked.owners import Owners
from sparsejax.errors import ArgumentError
from sparsejax.schemes.base import no_traffic, stage, traffic
from sparsejax.state import finite, observing, sharded, tree
from sparsejax.state.by_owner import ByOwner
from sparsejax.state.byte_totals import Totals
from sparsejax.state.per_rank import check_kind
from sparsejax.state.weights import own_weight
from sparsejax.transforms import checks
from sparsejax.transforms.buckets import Bucket, Everything
from sparsejax.transforms.checks import Leaves
from sparsejax.transforms.entry import Entry, Reduction
from sparsejax.transforms.exchange import ExchangeState
from sparsejax.transforms.feedback import Accumulated, Outcome
from sparsejax.units.units import rounded
from sparsejax.wire.collectives import Wire
from sparsejax.wire.value_codes import code_of


_NAME = "chunks"  # the name in metrics of the one bucket of all leaves
GATHERED = 8  # the most ranks without owners of blocks, unless the caller sets `via`


class OwnersState(NamedTuple):
    """The state of an exchange by owners.

    Attributes:
        exchange: The state of the exchange: its traffic.
        held: For each message, the part of its sums that owners hold back.
    """

    exchange: ExchangeState
    held: tuple[ByOwner, ...]


class _Summed(NamedTuple):
    """The results of an exchange of some leaves.

    Attributes:
        totals: The result of each leaf, float32.
        left: The part of each leaf that this rank holds back.
        held: The part of the sums of each group of blocks, [share, length], that this owner
            holds back; empty without owners.
        push: The bytes that this rank sent of its own entries.
        pull: The bytes that it sent of sums, as an owner.
    """

    totals: list[jax.Array]
    left: list[jax.Array]
    held: list[jax.Array]
    push: float
    pull: float = 0.0


@dataclasses.dataclass(frozen=True)
class ChunkedExchange:
    """Sends the largest entries of each block; see `Lossy` for its methods.

    Attributes:
        axis_name: The mesh axis of the ranks; the only manual one if None.
        k: The number of entries that a whole block sends.
        chunk: The number of elements of a whole block.
        values: The name of the value code.
        senders: Whether an element is divided by the number of ranks that sent it; else by
            that of all ranks.
        mean: Whether the result is the mean; else the mean times the number of ranks.
        clip_to_median: Whether the entries of a leaf are scaled to at most the median norm.
        cosines: Whether entries are cosine coefficients of a block; see `dct`.
        via: "all_gather" or "owners"; chosen by the number of ranks if None.
        pull_k: The number of entries of a whole block of a sum that its owner sends.
        decay: The share of the part that an owner held back that is added to the next sum.
    """

    axis_name: AxisName | None = None
    k: int = 64
    chunk: int = 4096
    values: str = "2bit"
    senders: bool = True
    mean: bool = True
    clip_to_median: bool = False
    cosines: bool = False
    via: str | None = None
    pull_k: int = 256
    decay: float = 1.0

    name = "sparsejax.chunked_sync"
    takes_rows = False
    takes_weight = True
    reads_often = True

    @property
    def entry(self) -> Entry:
        """The entry of its update under `jit`; see `Lossy.entry`."""
        return Entry(self.name, self.axis_name)

    @property
    def assignment(self) -> Everything:
        """The scheme of all leaves, for forecasts."""
        return Everything(Chunks(self.cost))

    def by_owners(self, ranks: int) -> bool:
        """Returns whether blocks have owners, for a number of ranks."""
        if self.via is None:
            return ranks > GATHERED and not self.clip_to_median
        return self.via == "owners"

    def cost(self, shapes: Sequence[Sequence[int]], ranks: int) -> Cost:
        """Returns the bytes and entries of an exchange of leaves of these shapes."""
        message, others = self._message(shapes), ranks - 1
        sent, most = message.entries, sum(cut.size for cut in message.cuts)
        if not self.by_owners(ranks):
            together = min(most, ranks * sent)
            return Cost(4 * others * message.words, 0, others, sent, together)
        owners = self._owners(message, ranks)
        push, pull = 4 * others * owners.push_words, 4 * others * owners.pull_words
        return Cost(push, pull, 2 * others, sent, owners.entries)

    def init(self, params: Any) -> ExchangeState | OwnersState | None:
        """Returns the first state, with zero traffic, and zeros held back by owners."""
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
        counts = {_NAME: no_traffic()}
        first = ExchangeState({}, counts, Totals.zero(), *made_for, sums)
        if self.via == "all_gather":
            return first
        why = "owners hold back what they have not sent of a sum"
        wire = Wire(axes.resolve_for_state(self.axis_name, self.name, why))
        if not self.by_owners(wire.ranks):
            return first
        held = [self._first_held(paths, leaves, own, wire) for own in _by_types(leaves)]
        return OwnersState(first, tuple(held))

    def _first_held(self, paths, leaves, places, wire):
        """Returns the first residuals of owners, zeros; it runs inside `shard_map`."""
        shapes = [leaves[i].shape for i in places]
        owners = self._owners(self._message(shapes), wire.ranks)
        zeros = [
            jnp.zeros((1, 1, one.share, one.group.length), jnp.float32)
            for one in owners.pieces
        ]
        over = tree.axes_of(leaves[places[0]])
        value = wire.per_rank(axes.as_varying(zeros, over) if over else zeros)
        of = tuple(paths[i] for i in places)
        shapes = tuple(map(tuple, shapes))
        return ByOwner(value, wire.axis, of, shapes, jnp.int32(wire.ranks))

    def _bucket(self, paths, leaves):
        """Returns one bucket of all leaves, for forecasts."""
        sizes = tuple(leaf.size for leaf in leaves)
        scheme = Chunks(self.cost, tuple(tuple(leaf.shape) for leaf in leaves))
        return Bucket(_NAME, scheme, tuple(range(len(paths))), tuple(paths), sizes, ())

    def _message(self, shapes):
        return RankMessage.of(shapes, self.k, self.chunk, code_of(self.values))

    def _owners(self, message, ranks):
        return Owners(message, ranks, self.pull_k, self.chunk)

    def of_shard(self, path: str, node: Any, wire: Wire) -> Any:
        """Returns the gradient of a sharded parameter, averaged; see `Lossy.of_shard`."""
        return sharded.synchronized(path, node, wire, self.mean)

    def leaves_out(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[bool]:
        """Returns True for each leaf: it is lossy."""
        del paths
        return [True] * len(leaves)

    def check(
        self, paths: Sequence[str], leaves: Sequence[Any], state: Any, wire: Wire
    ) -> None:
        """Raises if gradients are summed, or sparse, or the state is for other leaves."""
        for path, leaf in zip(paths, leaves, strict=True):
            axes.require_local(path, tree.numbers(leaf), wire.axis)
            if tree.is_sparse(leaf):
                raise ArgumentError(
                    f"the gradient of {path!r} is sparse already, and {self.name} selects "
                    "entries by itself: leave the sparsifier out, or take a lossless "
                    "synchronization, such as sparsejax.zen_sync()."
                )
            tree.check_dtype(path, leaf)
        by_owners = self.by_owners(wire.ranks)
        check_kind(state, OwnersState if by_owners else ExchangeState, self.name)
        of = state.exchange if by_owners else state
        of.leaves.check(paths, leaves, wire)

    def outline(
        self, paths: Sequence[str], leaves: Sequence[Any], wire: Wire
    ) -> list[jax.Array]:
        """Returns leaves that have the types of the results; see `Lossy.outline`."""
        del paths
        return [wire.assume_same(leaf) for leaf in leaves]

    def step(self, given: Accumulated, state: ExchangeState, wire: Wire) -> Outcome:
        """Sends the largest entries; see `Lossy.step`."""
        paths, likes = given.paths, given.likes
        dense, weight, entered = given.dense, given.weight, given.entered
        accumulated = list(given.leaves)
        if not dense:
            accumulated = list(map(checks.undifferentiated, accumulated, paths))
        if entered is not None:
            blocks.check_scatter(self.name, paths, entered.scatter)
        own = None if weight is None else own_weight(weight, wire)
        is_owned = isinstance(state, OwnersState)
        before = state.exchange if is_owned else state
        summed: list[Any] = [None] * len(accumulated)
        left, held = list(summed), []
        push, pull, sent, back = 0.0, 0.0, 0, 0
        size = max(1, sum(map(jnp.size, accumulated)))
        for number, places in enumerate(_by_types(accumulated)):
            leaves = [accumulated[i] for i in places]
            message = self._message([x.shape for x in leaves])
            waiting = [x[0, 0] for x in state.held[number].value] if is_owned else []
            waiting = [self.decay * x if self.decay != 1 else x for x in waiting]
            exchanged = self._owned if is_owned else self._gathered
            if self.cosines:
                exchanged = functools.partial(self._coefficients, exchanged)
            exchanged = self._all if dense else exchanged
            found = exchanged(message, leaves, waiting, own, wire)
            held.append([x[None, None] for x in found.held])
            cost = self.cost([x.shape for x in leaves], wire.ranks)
            push, pull = push + found.push, pull + found.pull
            sent, back = sent + cost.sent, back + cost.back
            for i, total, x in zip(places, found.totals, found.left, strict=True):
                summed[i], left[i] = total.astype(likes[i].dtype), x
        counts = traffic(
            stage(push, push, 1),
            stage(pull, pull, float(pull > 0)),
            dense=sum(wire.dense_bytes(x.size, x.dtype) for x in likes),
            before=1.0 if dense else sent / size,
            after=1.0 if dense else back / size,
            inside=0.0 if entered is None else sum(entered.inside),
        )
        sums = None if before.sums is None else before.sums.after(summed, wire)
        after = {"traffic": {_NAME: counts.as_one()}, "sums": sums}
        after = before._replace(totals=before.totals.plus([counts]), **after)
        if is_owned:
            pairs = zip(state.held, held, strict=True)
            after = OwnersState(after, tuple(one.with_value(x) for one, x in pairs))
        return Outcome(summed, left, [not dense] * len(summed), after)

    def _gathered(self, message, leaves, waiting, weight, wire):
        """Exchanges leaves by one all-gather of the messages of all ranks.

        Args:
            message: The format of the message.
            leaves: The accumulated leaves.
            waiting: The sums that owners held back: none here.
            weight: float32 [], the weight of this rank, or None.
            wire: The wire.
        """
        del waiting
        coded, own = message.select([rounded(x, jnp.float32) for x in leaves])
        words, sent = wire.all_gather(weights.with_weight(message.pack(coded), weight))
        words, of_ranks = weights.split(words, weight)
        scales = mine = None
        if self.clip_to_median and leaves:
            scales = clipping(message, words, of_ranks)
            mine = wire.per_rank(scales)[wire.rank]
        sizes = tuple(cut.size for cut in message.cuts)
        by = wire.ranks, self.senders, self.mean
        totals = Aggregate(message.unpack, sizes, *by)(words, of_ranks, scales)
        left = []
        for i, (x, (at, values)) in enumerate(zip(leaves, own, strict=True)):
            values = values if mine is None else values * mine[i]
            left.append(weights.left(x, at, values, weight))
        shaped = [total.reshape(x.shape) for total, x in zip(totals, leaves, strict=True)]
        return _Summed(shaped, left, [], sent)

    def _coefficients(self, exchanged, message, leaves, waiting, weight, wire):
        """Calls another exchange with the cosine coefficients of each block."""
        pairs = list(zip(message.cuts, leaves, strict=True))
        given = [dct.forward(cut, x) for cut, x in pairs]
        found = exchanged(message, given, waiting, weight, wire)
        left = []
        for (cut, x), before, after in zip(pairs, given, found.left, strict=True):
            # The sent part is subtracted from x: transforming what is left instead would
            # add the rounding errors of both transforms to the residual.
            own = tree.rounding_error(x, dct.inverse(cut, before - after))
            silent = None if weight is None else weights.kept(x, weight)
            left.append(own if silent is None else jnp.where(weight == 0, silent, own))
        totals = map(dct.inverse, message.cuts, found.totals)
        return found._replace(totals=list(totals), left=left)

    def _owned(self, message, leaves, waiting, weight, wire):
        """Exchanges leaves by owners, to whom pieces go, and entries of sums to all."""
        owners, rank = self._owners(message, wire.ranks), wire.rank
        coded, own = message.select([rounded(x, jnp.float32) for x in leaves])
        words, push = wire.all_to_all(weights.with_weight(owners.push(coded), weight))
        words, of_ranks = weights.split(words, weight)
        unpack = functools.partial(owners.entries_of, rank=rank)
        by = wire.ranks, self.senders, self.mean
        totals = Aggregate(unpack, owners.sizes, *by)(words, of_ranks, None)
        pairs = zip(totals, waiting, strict=True)
        words, held = owners.pull([x.reshape(y.shape) + y for x, y in pairs], rank)
        words, pull = wire.all_gather(words)
        pairs = zip(leaves, own, strict=True)
        left = [weights.left(x, at, values, weight) for x, (at, values) in pairs]
        return _Summed(owners.totals(words), left, held, push, pull)

    def _all(self, message, leaves, waiting, weight, wire):
        """Exchanges leaves, and the sums that owners hold back, by one dense all-reduce."""
        sent, divisor, own = 0.0, float(wire.ranks), leaves
        if weight is not None:
            total, sent = wire.all_reduce(weight[None])
            divisor = jnp.where(total[0] == 0, 1, total[0])
            own = [jnp.where(weight == 0, 0, weight * x) for x in leaves]
        scale = 1.0 if self.mean else float(wire.ranks)
        if waiting:
            held = self._owners(message, wire.ranks).leaves(waiting, wire.rank)
            if self.cosines:
                held = list(map(dct.inverse, message.cuts, held))
            pairs = zip(own, held, strict=True)
            own = [x + divisor / scale * y for x, y in pairs]
        flat = jnp.concatenate([rounded(x.reshape(-1), jnp.float32) for x in own])
        total, cost = wire.all_reduce(flat)
        total = total / divisor * scale
        sizes = [x.size for x in leaves]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        pairs = list(zip(leaves, ends, strict=True))
        parts = [total[end - x.size : end].reshape(x.shape) for x, end in pairs]
        error = lambda x: tree.rounding_error(x, rounded(x, jnp.float32))

        def silent(x):
            if weight is None:
                return error(x)
            factor = jnp.where(weight == 0, 1, weight)
            rest = error(factor * x) / factor
            return jnp.where(weight == 0, weights.kept(x, weight), rest)

        held = [jnp.zeros_like(x) for x in waiting]
        return _Summed(parts, list(map(silent, leaves)), held, sent + cost)


def _by_types(leaves):
    """Returns lists of the numbers of leaves that vary over the same mesh axes."""
    found: dict[frozenset[str], list[int]] = {}
    for i, leaf in enumerate(leaves):
        found.setdefault(tree.axes_of(leaf), []).append(i)
    return list(found.values())

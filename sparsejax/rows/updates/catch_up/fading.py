"""What a row misses while its momentum fades, all at once.

With a gradient of zero a momentum m becomes b m at each step, and the update is a
multiple of m. For SGD it depends on the step alone; for Adam and its like it is

    m w_t / (sqrt(v) x_t + 1)

where v, the mean of squares, becomes c v. The w_t and x_t of a step are taken from the
optimizer itself, run on m = 1 with v = 0 and v = 1, so they have its learning rate and the
corrections of its bias. The sum over the steps that a row has missed is one of fractions in
sqrt(v), one for each step; Gauss's quadrature makes a sum of six of it, which is
the same for all rows that were seen last at the same step, of all tables.

So a step makes the sums of all steps of whose momentum there is something left, some two
hundred for Adam, and no other: when it has faded, the sum of a step changes no more, and
the state keeps the last 16,384 of them. No row misses more steps than that: each step lists
a few rows besides those that were read, one table's 16,384th part after another, with a
gradient of zero. What the optimizer does to these is what the dense one does.

Where weights decay besides, as AdamW's, each step multiplies the parameter by a number d,
and with it all its earlier updates: a term is multiplied by d as often as steps
follow it. That d is the same at all steps shows in the optimizer's program; where it
depends on the step, as with a schedule, steps are taken one by one.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.axes import as_varying
from sparsejax.branches import cond
from sparsejax.rows import tiles
from sparsejax.rows.updates.call import Rows
from sparsejax.rows.updates.catch_up.missed import MissedSteps, decayed, over
from sparsejax.rows.updates.catch_up.quadrature import NODES, quadrature


# How much of a momentum is left when it is as good as nothing, and how many steps that may
# take for sums of that many terms to be worth it.
_LEFT, _TERMS_AT_MOST = 2.0**-33, 512
# How many steps a row may miss at most: the number of sums that are kept.
PATIENCE = 1 << 14
# The error of a sum, relative to it, up to which six nodes will do. In float32 a step
# itself rounds to 1e-6: the correction of Adam's bias is a difference of numbers near one.
_ERROR = 5e-6
# How many rows of a whole table catch up at a time, which takes a hundred bytes a row.
_ROWS = 262_144

# From steps to what m = 1 is moved by in each, with v = 0 and with v = 1.
Probe = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
# From a step, and numbers m, v and p [k], to what p is moved by.
Sample = Callable[..., jax.Array]
# On how many numbers an optimizer is tried.
SAMPLES = 64


def samples(
    missed: MissedSteps, tables: Sequence[int], step: jax.Array, m: Any, v: Any, p: Any
) -> list[jax.Array]:
    """How far a step with a gradient of zero moves numbers of each of some tables.

    Args:
        missed: The steps.
        tables: The tables.
        step: The step.
        m: [k], of the momentum.
        v: [k], of the mean of squares, if any.
        p: [k], of the parameter.
    """
    rows = {}
    for at in tables:
        shape = (m.shape[0],) + (1,) * (len(missed.params[at].shape) - 1)
        table = missed.call.layout.tables[at]
        own = [m if (j,) == table.idle else v for j in range(len(table.own))]
        own = tuple(x.reshape(shape) for x in own)
        rows[at] = Rows(p.reshape(shape), own, m)
    made, _ = missed.take(step, rows)
    return [made[at].reshape(-1) for at in tables]


def probe_of(sample: Sample, size: int = 2) -> Probe:
    """The probe of an optimizer.

    Args:
        sample: The optimizer.
        size: How many numbers it takes.
    """
    m, v, p = np.zeros((3, size), np.float32)
    m[:2] = v[1] = 1
    run = jax.jit(jax.vmap(lambda step: sample(step, m, v, p)))

    def probe(steps):
        made = run(steps)
        return made[:, 0], made[:, 1]

    return probe


class FadingSums(NamedTuple):
    """The sums by which rows move, one for each step that they may have seen last.

    Attributes:
        recent: float32 [terms + 1, 2 * nodes], the weights and then the points of each, by
            how many steps rows have missed.
        kept: float32 [`PATIENCE`, 2 * nodes]: of rows whose momentum has faded. That of a
            step s is in place s % `PATIENCE`.
    """

    recent: jax.Array
    kept: jax.Array


@dataclasses.dataclass(frozen=True)
class Fading:
    """Rows catch up by a sum over the steps that they have missed.

    Attributes:
        momentum: Which of the leaves of the state of a table is m.
        squares: Which of them is v; None if none is.
        factors: By what a step multiplies each of them.
        shrinks: What a step adds to the parameter besides, as a multiple of it.
        number: Of the sums, in `MissedSteps.sums`; tables that move equally share one.
    """

    momentum: int
    squares: int | None
    factors: tuple[float, ...]
    shrinks: float = 0.0
    number: int = 0
    lags = True
    moves = True
    is_cheap = True

    @property
    def terms(self) -> int:
        """After how many steps the momentum is as good as nothing."""
        return math.ceil(math.log(_LEFT) / math.log(self.factors[self.momentum]))

    @property
    def is_short(self) -> bool:
        """Whether that many terms are worth adding up."""
        return 0 < self.factors[self.momentum] < 1 and self.terms <= _TERMS_AT_MOST

    def sums(self, kept: jax.Array, count: jax.Array, probe: Probe) -> FadingSums:
        """The sums of rows that move to a step; with one more that is kept.

        Args:
            kept: Those that were kept before.
            count: The step.
            probe: The optimizer.
        """
        missed = 1 + jnp.arange(self.terms, dtype=jnp.int32)
        made = self.nodes(jnp.maximum(count - missed, 0), count, probe)
        # The first is of rows that have missed nothing.
        recent = jnp.pad(jnp.concatenate(made, 1), [(1, 0), (0, 0)])
        # The momentum of the last has faded now. Nobody reads what it is written over.
        step = count - self.terms
        place = jnp.where(step >= 0, lax.rem(step, np.int32(PATIENCE)), PATIENCE)
        written = jnp.asarray(kept).at[place].set(recent[self.terms], mode="drop")
        return FadingSums(recent, written)

    def due(self, height: int, step: jax.Array) -> jax.Array:
        """The rows of which the step is the turn, so that none waits for too long."""
        some = -(-height // PATIENCE)
        turns = -(-height // some)
        ids = lax.rem(step, np.int32(turns)) * some + jnp.arange(some, dtype=jnp.int32)
        return jnp.minimum(ids, height)

    def advance(self, missed: MissedSteps, rows: Mapping[int, Rows]) -> dict[int, Rows]:
        """Listed rows of tables that move equally, as after the last step."""
        return {at: self._advanced(missed, part) for at, part in rows.items()}

    def settled(self, missed: MissedSteps, rows: Mapping[int, Rows]) -> dict[int, Rows]:
        """All rows of tables that move equally, some at a time, if any of them is late."""

        def some_at_a_time(part):
            n = part.last.shape[0]
            if n <= _ROWS:
                return self._advanced(missed, part)

            def one(number, made):
                # The last part begins where it ends with the rows; some are moved twice,
                # from where they were at first.
                start = jnp.minimum(number * _ROWS, n - _ROWS)
                cut = lambda x: lax.dynamic_slice_in_dim(x, start, _ROWS)
                put = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0)
                moved = self._advanced(missed, jax.tree.map(cut, part))
                return jax.tree.map(put, made, moved)

            return lax.fori_loop(0, -(-n // _ROWS), one, part)

        def one(part):
            part = as_varying(part, tiles.axes_of(part, missed.count))
            late = jnp.any(part.last < missed.count)
            return cond(late, some_at_a_time, lambda part: part, part)

        return {at: one(part) for at, part in rows.items()}

    def _advanced(self, missed, part):
        """Rows of a table after the steps that they have missed."""
        moved = self._moved_to(missed.count, part, missed.sums[self.number])
        own = decayed(part.own, self.factors, missed.count - part.last)
        return Rows(moved, own, jnp.broadcast_to(missed.count, part.last.shape))

    def _moved_to(self, count, part, sums):
        """The parameter of rows after the steps up to `count`, by the sums of that one."""
        param, own, last = part
        missed = count - last
        is_recent = (missed <= self.terms)[:, None]
        recent, kept = as_varying(tuple(sums), tiles.axes_of(own, last, count, sums))
        of_recent = recent[jnp.minimum(missed, self.terms)]
        of_kept = kept[lax.rem(last, np.int32(PATIENCE))]
        moved = self._moved(own, jnp.where(is_recent, of_recent, of_kept))
        if not self.shrinks:
            return param + moved
        # The momentum has faded after `terms` steps, and what it moved decays from there.
        moved = moved * over(self._shrunk(missed - self._near(missed)), moved)
        lost = jnp.expm1(missed.astype(jnp.float32) * math.log1p(self.shrinks))
        return param + (param * over(lost, param) + moved)

    def _near(self, missed):
        """How many steps the sum of its nodes goes over."""
        return jnp.minimum(missed, self.terms)

    def _shrunk(self, steps):
        """The factor by which weights decay in `steps` steps."""
        return jnp.exp(steps.astype(jnp.float32) * math.log1p(self.shrinks))

    def _moved(self, own, sums):
        """What momentum moves rows by, up to the step when it has faded.

        Args:
            own: The leaves of the state.
            sums: [n, 2 * nodes], that of each row.
        """
        weights, points = jnp.split(sums, 2, axis=1)
        m = own[self.momentum]
        if self.squares is None:
            return m * over(weights[:, 0], m)
        root = jnp.sqrt(own[self.squares])
        pairs = [(weights[:, i], points[:, i]) for i in range(NODES)]
        return m * sum(over(w, m) / (root * over(x, m) + 1) for w, x in pairs)

    def _terms(self, made, after):
        """The weight and the point of a term: see the module.

        Args:
            made: What m = 1 is moved by in a step, with v = 0 and with v = 1.
            after: How many steps after the one that a row has seen last.
        """
        weights, with_squares = made
        after = jnp.asarray(after).astype(jnp.float32)
        faded = jnp.float32(self.factors[self.momentum]) ** after
        if self.squares is None:
            return weights * faded, jnp.zeros_like(weights)
        points = weights / jnp.where(with_squares == 0, 1, with_squares) - 1
        # A learning rate of zero moves nothing, and says nothing of the points.
        points = jnp.where(weights == 0, 1, points)
        return weights * faded, points * jnp.float32(self.factors[self.squares]) ** (
            after / 2
        )

    def nodes(self, last, count, probe):
        """The weights and points of the sum that rows of each step are moved by.

        Args:
            last: int32 [k], the steps that rows have seen last; none later than `count`
                but those that are not meant.
            count: The step that they move to.
            probe: The optimizer.

        Returns:
            Two arrays [k, nodes].
        """
        after = jnp.arange(self.terms, dtype=jnp.int32)
        seen = jnp.minimum(last, count)[:, None]
        steps = seen + 1 + after
        # Before the first step no bias is corrected.
        made = probe(jnp.clip(steps, 1, jnp.maximum(count, 1)).reshape(-1))
        made = tuple(x.reshape(steps.shape) for x in made)
        weights, points = self._terms(made, after)
        if self.shrinks:
            follow = self._near(count - seen) - 1 - after
            weights = weights * self._shrunk(jnp.maximum(follow, 0))
        weights = jnp.where(steps <= count, weights, 0)
        if self.squares is None:
            total = weights.sum(1, keepdims=True)
            return total, jnp.zeros_like(total)
        return quadrature(weights, points)

    def is_right(self, sampled: Sample) -> bool:
        """Whether an optimizer moves rows as this says, on `SAMPLES` numbers."""
        probe = probe_of(sampled, SAMPLES)
        rng = np.random.default_rng(0)
        m, p = rng.normal(size=(2, SAMPLES)) * 10 ** rng.uniform(-4, 2, (2, SAMPLES))
        v = 10 ** rng.uniform(-20, 4, SAMPLES)
        numbers = [x.astype(np.float32) for x in (m, v, p)]
        some = np.array([1, 2, 3, 5, 10, 30, 100, 1000, 30_000], np.int32)
        run, sample = _compiled(probe, np.resize(some, self.terms)), None
        made = run(np.resize(some, self.terms))
        for step, weight, with_squares, _ in zip(some, *made, some, strict=False):
            sample = sample or _compiled(sampled, step, *numbers)
            point = 0 if self.squares is None or not weight else weight / with_squares - 1
            parts = m * weight / (np.sqrt(v) * point + 1), p * self.shrinks
            error = np.abs(sample(step, *numbers) - sum(parts))
            if not np.all(error <= 1e-30 + 1e-5 * sum(map(np.abs, parts))):
                return False
        if self.squares is None:
            return True
        b, c = self.factors[self.momentum], self.factors[self.squares]
        fraction = lambda w, x: np.sum(w / (np.sqrt(v)[:, None] * x + 1), 1)
        lasts, after = np.array([1, 2, 10, 1000], np.int32), np.arange(self.terms)
        nodes = _compiled(lambda last, n: self.nodes(last, n, probe), lasts[:1], lasts[0])
        for last in lasts:
            weights, with_squares = run((last + 1 + after).astype(np.int32))
            points = weights / np.where(weights == 0, 1, with_squares) - 1
            points = points * c ** (after / 2)
            for more in (3, 30, self.terms):
                follow = np.maximum(min(more, self.terms) - 1 - after, 0)
                terms = weights * b**after * (1 + self.shrinks) ** follow
                want = fraction(np.where(after < more, terms, 0), points)
                got = fraction(*nodes(np.array([last]), np.int32(last + more)))
                if not np.allclose(got, want, rtol=_ERROR, atol=0):
                    return False
        return True


def _compiled(function, *like):
    """A function on numbers, which runs where it is called, inside a traced one too.

    And under `jax.disable_jit`, which has no compiled programs.
    """
    with jax.disable_jit(False):
        program = jax.jit(function).lower(*like).compile()

    def run(*args):
        with jax.disable_jit(False):
            return jax.tree.map(lambda x: np.asarray(x, np.float64), program(*args))

    return run


def first_kept(way: Fading) -> jax.Array:
    """The kept sums before the first step: none is known, and none is read."""
    nodes = 1 if way.squares is None else NODES
    return jnp.zeros((PATIENCE, 2 * nodes), jnp.float32)

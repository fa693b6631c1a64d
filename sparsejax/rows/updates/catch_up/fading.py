"""Computes the sum of the steps that a row misses while its momentum fades.

With a gradient of zero a momentum m becomes b m at each step, and the update is a
multiple of m. For SGD the factor depends on the step alone; for Adam and others it is

    m w_t / (sqrt(v) x_t + 1)

where v, the mean of squares, becomes c v. The w_t and x_t of a step are derived from the
optimizer itself, run on m = 1 with v = 0 and v = 1, so they include its learning rate and
bias corrections. The sum over the steps that a row has missed has one fraction in sqrt(v)
for each step; Gauss's quadrature reduces it to six fractions, which are the same for all
rows, of all tables, that have last seen the same step.

A step computes such sums for those last steps whose momentum has not faded yet, about two
hundred for Adam, and for no others: once it has faded, a sum does not change any more, and
the state keeps the last 16,384 of them. No row misses more steps than that: each step also
lists a few rows that were not read, one 16,384th part of each table in turn, with a
gradient of zero. The dense optimizer applies the same step to these.

If weights decay, too, as in AdamW, each step multiplies the parameter by a number d, and
with it all earlier updates: a term is multiplied by d once for each step that follows it.
The optimizer's program shows whether d is the same at all steps; if it depends on the step,
as with a schedule, steps are taken one by one.
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


# The fraction of a momentum at which it counts as faded, and the upper bound of the number
# of steps until then, up to which sums of as many terms are worthwhile.
_LEFT, _TERMS_AT_MOST = 2.0**-33, 512
# The upper bound of the steps that a row may miss: the number of sums that are kept.
PATIENCE = 1 << 14
# The tolerated relative error of a sum of six nodes. In float32 a step itself has an error
# of 1e-6: Adam's bias correction is a difference of numbers near one.
_ERROR = 5e-6
# The number of rows of a whole table that catch up at a time, at a hundred bytes per row.
_ROWS = 262_144

# A function of steps [k] that returns the updates for m = 1 with v = 0 and with v = 1.
Probe = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
# A function of a step and of m, v and p, each [k], that returns the updates of p.
Sample = Callable[..., jax.Array]
# The number of elements on which an optimizer is compared with `Fading`.
SAMPLES = 64


def samples(
    missed: MissedSteps, tables: Sequence[int], step: jax.Array, m: Any, v: Any, p: Any
) -> list[jax.Array]:
    """Returns for each table the updates, [k], of a step with a gradient of zero.

    Args:
        missed: The steps.
        tables: The numbers of the tables.
        step: The step.
        m: [k], values of the momentum.
        v: [k], values of the mean of squares, which is used if there is one.
        p: [k], values of the parameter.
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
    """Makes the probe of an optimizer.

    Args:
        sample: The updates of the optimizer.
        size: The number of elements k that `sample` takes.
    """
    m, v, p = np.zeros((3, size), np.float32)
    m[:2] = v[1] = 1
    run = jax.jit(jax.vmap(lambda step: sample(step, m, v, p)))

    def probe(steps):
        made = run(steps)
        return made[:, 0], made[:, 1]

    return probe


class FadingSums(NamedTuple):
    """The sums by which rows catch up, one for each step that they may have seen last.

    Attributes:
        recent: float32 [terms + 1, 2 * nodes], the weights and then the points of each sum,
            by the number of steps that rows have missed.
        kept: float32 [`PATIENCE`, 2 * nodes], the sums for rows whose momentum has faded.
            That of rows that have last seen step s is at s % `PATIENCE`.
    """

    recent: jax.Array
    kept: jax.Array


@dataclasses.dataclass(frozen=True)
class Fading:
    """Rows catch up by a sum over the steps that they have missed.

    Attributes:
        momentum: The position of m among the leaves of a table's state.
        squares: The position of v among them; None if there is no v.
        factors: The factors by which a step multiplies each of these leaves.
        shrinks: The additional update of the parameter by weight decay, as a multiple of
            the parameter.
        number: The number of the sums in `MissedSteps.sums`; tables with equal programs
            share one.
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
        """The number of steps after which the momentum has faded: the terms of a sum."""
        return math.ceil(math.log(_LEFT) / math.log(self.factors[self.momentum]))

    @property
    def is_short(self) -> bool:
        """Whether there are few enough terms for sums to be worthwhile."""
        return 0 < self.factors[self.momentum] < 1 and self.terms <= _TERMS_AT_MOST

    def sums(self, kept: jax.Array, count: jax.Array, probe: Probe) -> FadingSums:
        """Computes the sums by which rows catch up to a step, and keeps the last of them.

        Args:
            kept: float32 [`PATIENCE`, 2 * nodes], the sums that were kept before.
            count: int32 [], the step.
            probe: The probe of the optimizer.
        """
        missed = 1 + jnp.arange(self.terms, dtype=jnp.int32)
        made = self.nodes(jnp.maximum(count - missed, 0), count, probe)
        # The first sum is zero, for rows that have missed no step.
        recent = jnp.pad(jnp.concatenate(made, 1), [(1, 0), (0, 0)])
        # The momentum of the last sum has faded now. It replaces the sum of a step that is
        # `PATIENCE` steps older, which is not the last step that any row has seen.
        step = count - self.terms
        place = jnp.where(step >= 0, lax.rem(step, np.int32(PATIENCE)), PATIENCE)
        written = jnp.asarray(kept).at[place].set(recent[self.terms], mode="drop")
        return FadingSums(recent, written)

    def due(self, height: int, step: jax.Array) -> jax.Array:
        """Returns the ids whose turn is at this step; no row waits for over `PATIENCE`."""
        some = -(-height // PATIENCE)
        turns = -(-height // some)
        ids = lax.rem(step, np.int32(turns)) * some + jnp.arange(some, dtype=jnp.int32)
        return jnp.minimum(ids, height)

    def advance(self, missed: MissedSteps, rows: Mapping[int, Rows]) -> dict[int, Rows]:
        """Catches up listed rows of tables that share sums to the last step."""
        return {at: self._advanced(missed, part) for at, part in rows.items()}

    def settled(self, missed: MissedSteps, rows: Mapping[int, Rows]) -> dict[int, Rows]:
        """Catches up all rows of tables that have late rows, `_ROWS` at a time."""

        def some_at_a_time(part):
            n = part.last.shape[0]
            if n <= _ROWS:
                return self._advanced(missed, part)

            def one(number, made):
                # The last part ends with the last row and may overlap the one before: rows
                # in both are computed twice, each time from their original values.
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
        """Returns rows of a table after the steps that they have missed."""
        moved = self._moved_to(missed.count, part, missed.sums[self.number])
        own = decayed(part.own, self.factors, missed.count - part.last)
        return Rows(moved, own, jnp.broadcast_to(missed.count, part.last.shape))

    def _moved_to(self, count, part, sums):
        """Returns the parameter of rows after the steps up to `count`, given its sums."""
        param, own, last = part
        missed = count - last
        is_recent = (missed <= self.terms)[:, None]
        recent, kept = as_varying(tuple(sums), tiles.axes_of(own, last, count, sums))
        of_recent = recent[jnp.minimum(missed, self.terms)]
        of_kept = kept[lax.rem(last, np.int32(PATIENCE))]
        moved = self._moved(own, jnp.where(is_recent, of_recent, of_kept))
        if not self.shrinks:
            return param + moved
        # The momentum has faded after `terms` steps; the sum of its updates then decays.
        moved = moved * over(self._shrunk(missed - self._near(missed)), moved)
        lost = jnp.expm1(missed.astype(jnp.float32) * math.log1p(self.shrinks))
        return param + (param * over(lost, param) + moved)

    def _near(self, missed):
        """Returns the number of steps that are terms of the sum."""
        return jnp.minimum(missed, self.terms)

    def _shrunk(self, steps):
        """Returns the factor by which weights decay in `steps` steps."""
        return jnp.exp(steps.astype(jnp.float32) * math.log1p(self.shrinks))

    def _moved(self, own, sums):
        """Returns the sum of the updates of momentum, up to the step when it has faded.

        Args:
            own: The leaves of the state.
            sums: [n, 2 * nodes], the sum of each row.
        """
        weights, points = jnp.split(sums, 2, axis=1)
        m = own[self.momentum]
        if self.squares is None:
            return m * over(weights[:, 0], m)
        root = jnp.sqrt(own[self.squares])
        pairs = [(weights[:, i], points[:, i]) for i in range(NODES)]
        return m * sum(over(w, m) / (root * over(x, m) + 1) for w, x in pairs)

    def _terms(self, made, after):
        """Returns the weights and points of terms, w and x of the module's formula.

        Args:
            made: The updates of steps for m = 1, with v = 0 and with v = 1.
            after: The number of missed steps before each of these steps.
        """
        weights, with_squares = made
        after = jnp.asarray(after).astype(jnp.float32)
        faded = jnp.float32(self.factors[self.momentum]) ** after
        if self.squares is None:
            return weights * faded, jnp.zeros_like(weights)
        points = weights / jnp.where(with_squares == 0, 1, with_squares) - 1
        # With a learning rate of zero the weight is zero, and the point is arbitrary.
        points = jnp.where(weights == 0, 1, points)
        return weights * faded, points * jnp.float32(self.factors[self.squares]) ** (
            after / 2
        )

    def nodes(self, last, count, probe):
        """Returns the weights and points of the sums by which rows catch up.

        Args:
            last: int32 [k], the last steps that rows have seen. Results for steps later
                than `count` are not used.
            count: int32 [], the step to which rows catch up.
            probe: The probe of the optimizer.

        Returns:
            Two arrays [k, nodes].
        """
        after = jnp.arange(self.terms, dtype=jnp.int32)
        seen = jnp.minimum(last, count)[:, None]
        steps = seen + 1 + after
        # Bias corrections are defined from step 1 on.
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
        """Returns whether an optimizer moves `SAMPLES` elements as this method computes."""
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
    """Compiles a function of NumPy arrays that runs when called, even inside a traced one.

    It is compiled under `jax.disable_jit`, too.
    """
    with jax.disable_jit(False):
        program = jax.jit(function).lower(*like).compile()

    def run(*args):
        with jax.disable_jit(False):
            return jax.tree.map(lambda x: np.asarray(x, np.float64), program(*args))

    return run


def first_kept(way: Fading) -> jax.Array:
    """Returns the kept sums before the first step: zeros, which are not read."""
    nodes = 1 if way.squares is None else NODES
    return jnp.zeros((PATIENCE, 2 * nodes), jnp.float32)

"""What a row misses while its momentum fades, all at once.

With a gradient of zero a momentum m becomes b m at each step, and what is moved is a
multiple of m. For SGD it depends on the step alone; for Adam and its like it is

    m w_t / (sqrt(v) x_t + 1)

where v, the mean of squares, becomes c v. The w_t and x_t of a step are taken from the
optimizer itself, run on m = 1 with v = 0 and v = 1, so they have its learning rate and the
corrections of its bias. The sum over the steps that a row has missed is one of fractions in
sqrt(v), as many as there are steps; Gauss's quadrature makes a sum of six of it, which is
the same for all rows that were seen last at the same step.

Where weights decay besides, as AdamW's, each step multiplies the parameter by a number d,
and with it all that it was moved by before: a term is multiplied by d as often as steps
follow it. That d is the same at all steps shows in the optimizer's program; where it
depends on the step, as with a schedule, steps are taken one by one.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.rank_select import running_sum
from sparsejax.axes import as_varying, varying_axes


NODES = 6
# How much of a momentum is left when it is as good as nothing, and how many steps that may
# take for sums of so many terms to be worth it.
_LEFT, _TERMS_AT_MOST = 2.0**-33, 512
# Of how many steps sums are made at a time.
_BLOCK = 256
# Among how many steps those that rows have seen last are looked for at a time.
_STEPS = 1 << 14
# The error of a sum, relative to it, up to which six nodes will do. In float32 a step
# itself rounds to 1e-6: the correction of Adam's bias is a difference of numbers near one.
_ERROR = 5e-6

# From steps to what m = 1 is moved by in each, with v = 0 and with v = 1.
Probe = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


class Nodes(NamedTuple):
    """The sums by which rows move, one for all that were last seen at the same step.

    Attributes:
        sums: float32 [steps, 2 * nodes], the weights and then the points of each.
        place: int32 [n], which of these each row of the table has.
    """

    sums: jax.Array
    place: jax.Array


class Fading(NamedTuple):
    """How a row moves while its momentum fades.

    Attributes:
        momentum: Which of the leaves of the state of a table is m.
        squares: Which of them is v; None if there is none.
        factors: By what a step multiplies each of them.
        shrinks: What a step adds to the parameter besides, as a multiple of it.
    """

    momentum: int
    squares: int | None
    factors: tuple[float, ...]
    shrinks: float = 0.0

    @property
    def terms(self) -> int:
        """After how many steps the momentum is as good as nothing."""
        return math.ceil(math.log(_LEFT) / math.log(self.factors[self.momentum]))

    @property
    def is_short(self) -> bool:
        """Whether so many terms are worth adding up."""
        return 0 < self.factors[self.momentum] < 1 and self.terms <= _TERMS_AT_MOST

    def caught_up(
        self,
        param: jax.Array,
        own: tuple[jax.Array, ...],
        nodes: "Nodes",
        missed: jax.Array,
    ) -> jax.Array:
        """The parameter of rows after the steps that they have missed.

        Args:
            param: Rows of a table.
            own: The leaves of the state, these rows of them.
            nodes: Of these rows, from `of_steps`.
            missed: int32 [n], how many steps each has missed.
        """
        moved = self._moved(own, nodes)
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
        """The factor by which weights decay in so many steps."""
        return jnp.exp(steps.astype(jnp.float32) * math.log1p(self.shrinks))

    def _moved(self, own, nodes):
        """What momentum moves rows by, up to the step when it has faded."""
        weights, points = jnp.split(nodes.sums[nodes.place], 2, axis=1)
        m = own[self.momentum]
        if self.squares is None:
            return m * over(weights[:, 0], m)
        root = jnp.sqrt(own[self.squares])
        pairs = [(weights[:, i], points[:, i]) for i in range(NODES)]
        return m * sum(over(w, m) / (root * over(x, m) + 1) for w, x in pairs)

    def of_steps(self, last: jax.Array, count: jax.Array, probe: Probe) -> "Nodes":
        """The nodes of rows that move to a step: once for all that were last seen at one.

        Args:
            last: int32 [n], the step that each row has seen last.
            count: The step that they move to.
            probe: The optimizer.
        """
        steps, place, found = _distinct(last, count)
        blocks = lax.div(found + _BLOCK - 1, _BLOCK)
        steps = jnp.pad(steps, (0, _BLOCK), constant_values=np.iinfo(np.int32).max)

        def one_block(block, sums):
            at = block * _BLOCK
            made = self.nodes(lax.dynamic_slice(steps, (at,), (_BLOCK,)), count, probe)
            return lax.dynamic_update_slice(sums, jnp.concatenate(made, 1), (1 + at, 0))

        # The first is of rows that have missed nothing.
        width = NODES if self.squares is not None else 1
        sums = jnp.zeros((1 + last.shape[0] + _BLOCK, 2 * width), jnp.float32)
        sums = as_varying(sums, varying_axes(last) | varying_axes(count))
        return Nodes(lax.fori_loop(0, blocks, one_block, sums), place)

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
        weights, with_squares = probe(jnp.minimum(steps, count).reshape(-1))
        weights, with_squares = (
            weights.reshape(steps.shape),
            with_squares.reshape(steps.shape),
        )
        faded = jnp.float32(self.factors[self.momentum]) ** after.astype(jnp.float32)
        if self.shrinks:
            follow = self._near(count - seen) - 1 - after
            faded = faded * self._shrunk(jnp.maximum(follow, 0))
        if self.squares is None:
            total = jnp.where(steps <= count, weights * faded, 0).sum(1, keepdims=True)
            return total, jnp.zeros_like(total)
        points = weights / jnp.where(with_squares == 0, 1, with_squares) - 1
        roots = jnp.float32(self.factors[self.squares]) ** (after.astype(jnp.float32) / 2)
        # A learning rate of zero moves nothing, and says nothing of the points.
        points = jnp.where(weights == 0, 1, points) * roots
        weights = jnp.where(steps <= count, weights * faded, 0)
        return _quadrature(weights, points)

    def is_right(self, probe: Probe, sampled: Callable[..., Any]) -> bool:
        """Whether an optimizer moves rows as this says, on numbers.

        Args:
            probe: The optimizer on m = 1.
            sampled: From a step, and numbers m, v and p [k] to what p is moved by.
        """
        rng = np.random.default_rng(0)
        m, p = rng.normal(size=(2, 64)) * 10 ** rng.uniform(-4, 2, (2, 64))
        v = 10 ** rng.uniform(-20, 4, 64)
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

    And where `jax.disable_jit` holds, which knows no compiled programs.
    """
    with jax.disable_jit(False):
        program = jax.jit(function).lower(*like).compile()

    def run(*args):
        with jax.disable_jit(False):
            return jax.tree.map(lambda x: np.asarray(x, np.float64), program(*args))

    return run


def decayed(
    own: tuple[jax.Array, ...], factors: tuple[float, ...], steps: jax.Array
) -> tuple[jax.Array, ...]:
    """The state of rows each of which is multiplied so many times.

    The relative error is that of the power's logarithm, which is rounded once.
    """

    def one(x, factor):
        if factor == 1:
            return x
        if factor == 0:
            power = (steps == 0).astype(x.dtype)
        else:
            power = jnp.exp(steps.astype(x.dtype) * math.log(factor))
        return x * over(power, x)

    return tuple(map(one, own, factors))


def over(flags: Any, x: jax.Array) -> jax.Array:
    """Something by row, with as many axes as an array of rows."""
    flags = jnp.asarray(flags)
    return flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim))


def _distinct(last, count):
    """The steps that late rows have seen last, so many to a turn, the latest first.

    Returns:
        int32 [n], the distinct steps; int32 [n], which of them, from 1 on, each row has, 0
        if it is not late; and how many there are.
    """
    n = last.shape[0]
    before = lambda step: jnp.max(jnp.where(last < step, last, -1), initial=-1)

    def some(state):
        top, found, steps, place = state
        ago = jnp.where(last <= top, top - last, _STEPS)
        seen = jnp.zeros(_STEPS, jnp.int32).at[ago].set(1, mode="drop")
        ranks = found + running_sum(seen)
        at = jnp.where(seen == 1, ranks - 1, n)
        steps = steps.at[at].set(top - lax.iota(jnp.int32, _STEPS), mode="drop")
        here = ago < _STEPS
        place = jnp.where(here, ranks[jnp.where(here, ago, 0)], place)
        return before(top - (_STEPS - 1)), ranks[-1], steps, place

    nothing = jnp.zeros(n, jnp.int32)
    start = before(count), jnp.int32(0), nothing, nothing
    start = as_varying(start, varying_axes(last) | varying_axes(count))
    _, found, steps, place = lax.while_loop(lambda state: state[0] >= 0, some, start)
    return steps, place, found


def _quadrature(weights, points):
    """Few weights and points of a sum of fractions w / (r x + 1), for all r.

    Gauss's for the measure w / x, so that sums for large r are exact. Points lie close to
    each other: where they are is taken relative to the first.
    """
    first = points[:, :1]
    place, measure = points / first - 1, weights / points
    sign = jnp.where(measure.sum(1, keepdims=True) < 0, -1.0, 1.0)
    measure = measure * sign
    total = measure.sum(1, keepdims=True)
    # Where there is no term, powers of its place would only grow.
    place = jnp.where(measure > 0, place, 0)
    before = jnp.zeros_like(place)
    now = jnp.where(measure > 0, lax.rsqrt(jnp.where(total > 0, total, 1)), 0)
    inner, outer = [], [jnp.zeros_like(total)]
    for _ in range(NODES):
        middle = (measure * place * now * now).sum(1, keepdims=True)
        rest = (place - middle) * now - outer[-1] * before
        length = jnp.sqrt((measure * rest * rest).sum(1, keepdims=True))
        inner.append(middle)
        outer.append(length)
        # With no more terms than this, what is left is nothing.
        before, now = now, jnp.where(length > 0, rest / jnp.where(length > 0, length, 1), 0)
    inner, outer = jnp.concatenate(inner, 1), jnp.concatenate(outer[1:-1], 1)
    index = np.arange(NODES)
    matrix = jnp.zeros((*inner.shape, NODES)).at[:, index, index].set(inner)
    matrix = matrix.at[:, index[:-1], index[1:]].set(outer)
    matrix = matrix.at[:, index[1:], index[:-1]].set(outer)
    at, share = _eigen(matrix)
    at = first * (1 + at)
    return sign * total * share**2 * at, at


# Of six numbers in three pairs, so that after five turns each has met each.
_TURN = np.array([0, 3, 1, 5, 2, 4])
_SWEEPS = 6


def _eigen(matrices):
    """The eigenvalues of symmetric matrices [k, 6, 6], and the first number of each vector.

    By Jacobi's rotations, of three pairs at a time. `jnp.linalg.eigh` hangs where several
    devices of a CPU call it at once: JAX's kernel (0.10 to 0.12) hands parts of a batch to
    the threads that all of them wait on.
    """
    k, n = matrices.shape[:2]
    # Matrices lie along the last axis: CPUs work on several of them at a time.
    same = np.eye(n // 2, dtype=bool)[:, None, :, None, None]

    def turn(_, state):
        a, first = state
        blocks = jnp.where(same, a.reshape(n // 2, 2, n // 2, 2, k), 0).sum(2)
        off = blocks[:, 0, 1]
        ratio = (blocks[:, 1, 1] - blocks[:, 0, 0]) / jnp.where(off == 0, 1, 2 * off)
        tangent = jnp.where(ratio < 0, -1, 1) / (jnp.abs(ratio) + jnp.sqrt(ratio**2 + 1))
        tangent = jnp.where(off == 0, 0, tangent)
        cosine = lax.rsqrt(tangent**2 + 1)
        sine = tangent * cosine

        def rotated(x):
            """Pairs of numbers [3, 2, ..., k], each by its angle."""
            c, s = (y.reshape(n // 2, *[1] * (x.ndim - 3), k) for y in (cosine, sine))
            one, other = x[:, 0], x[:, 1]
            x = jnp.stack([c * one - s * other, s * one + c * other], axis=1)
            return x.reshape(n, *x.shape[2:])[_TURN]

        a = rotated(a.reshape(n // 2, 2, n, k)).swapaxes(0, 1)
        a = rotated(a.reshape(n // 2, 2, n, k))
        return a, rotated(first.reshape(n // 2, 2, k))

    first = jnp.zeros((n, k), matrices.dtype).at[0].set(1)
    first = as_varying(first, varying_axes(matrices))
    start = jnp.moveaxis(matrices, 0, -1), first
    a, first = lax.fori_loop(0, _SWEEPS * (n - 1), turn, start)
    return jnp.where(np.eye(n, dtype=bool)[..., None], a, 0).sum(1).T, first.T

"""A threshold found exactly every so many steps, and used again in between.

Gradients change slowly, so yesterday's threshold lets through about as many today. After
each step it is moved by about a per cent where fewer than 2/3 or more than 5/4 as many as
wanted were as large: so most steps read the array once to select, and none to find out
what. Ok-Topk is built on it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import errors
from sparsejax.axes import as_varying, varying_axes
from sparsejax.sparsifiers import base
from sparsejax.sparsifiers.top_k import exact
from sparsejax.units import magnitudes


@dataclasses.dataclass(frozen=True)
class ReuseThreshold(base.ByMagnitude):
    """All elements from a threshold on that was found some steps ago.

    Attributes:
        every: The threshold is found exactly at every so many steps.
        step: By how much it is moved in between.
    """

    every: int = 32
    step: float = 1.012

    def __post_init__(self):
        super().__post_init__()
        errors.check_whole("every", self.every, 1)
        errors.check_positive("step", self.step, 1)

    def init(self, size, dtype):
        return jnp.zeros((), dtype)

    @property
    def room(self):
        return 1.25

    def level(self, x, state, draw):
        found = lambda: magnitudes.magnitude_of(exact(x, draw), x.dtype)
        again = lambda: state.astype(x.dtype)
        axes = varying_axes(jax.eval_shape(found)) | varying_axes(state)
        typed = lambda side: lambda: as_varying(side(), axes)
        due = draw.step % self.every == 0
        t = lax.cond(due, typed(found), typed(again))
        return magnitudes.key_of(t, x.dtype), t

    def after(self, state, count, draw):
        fewer, more = 3 * count < 2 * draw.wanted, 4 * count > 5 * draw.wanted
        return jnp.where(
            fewer, state / self.step, jnp.where(more, state * self.step, state)
        )

"""Deep Gradient Compression: a threshold from a sample, corrected if it is far off.

The sample has one element in a hundred, or more, so that about 64 of the k largest are in
it. The threshold selects the same share of the sample as k is of the array. While it
selects more than 1.3 k elements of the array it is multiplied by 1.3, and while it selects
fewer than 0.8 k by 0.8, at most ten times. If that does not suffice, as with elements that
are all equal, the largest are selected exactly. The shards of a tensor join their samples,
so that all shards have one threshold (Zen, section 3.4).
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from sparsejax import arguments
from sparsejax.branches import at_number, hidden
from sparsejax.sparsifiers import base
from sparsejax.sparsifiers.by_estimate.estimate import ByEstimate
from sparsejax.units.selection import magnitudes, selections
from sparsejax.units.selection.corrections import Correction


SEEN = 64  # The least expected number of the k largest elements in a sample.


class BySample(base.ByMagnitude):
    """A sparsifier with a threshold from a sample, whose share is the field `sample`."""

    sample: float

    def level(self, x, state, draw):
        (level,), _ = self.levels([x], [state], [draw])
        return level, state

    def levels(self, arrays, states, draws):
        return sampled(arrays, draws, self.sample, self.density), list(states)


@dataclasses.dataclass(frozen=True)
class DGC(ByEstimate, BySample):
    """Selects all elements that reach a threshold, which is estimated from a sample.

    The threshold selects the same share of the sample as k is of the array. While it
    selects fewer than `lower` k or more than `upper` k elements of the array, it is
    multiplied by `lower` or `upper`, at most `rounds` times. If that does not suffice, the
    `upper` k largest are selected exactly.

    Attributes:
        density: The share of elements to send, k of the size: a number, a `Warmup` or a
            `Schedule`.
        sample: The share of elements in the sample. A sample of a small array is larger:
            about 64 of the k largest are in it.
        lower: The least accepted count, as a multiple of k.
        upper: The largest accepted count, as a multiple of k. The capacity is that large.
        rounds: The largest number of corrections.

    Example:
        >>> dgc = sparsejax.sparsify(sparsejax.sparsifiers.DGC(0.01, sample=0.05))
        >>> tx = optax.chain(dgc, sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for
        Distributed Training, ICLR 2018
    """

    sample: float = 0.01
    lower: float = 0.8
    upper: float = 1.3
    rounds: int = 10

    def __post_init__(self):
        super().__post_init__()
        arguments.check_density("sample", self.sample)
        arguments.check_positive("lower", self.lower, 0, 1)
        arguments.check_positive("upper", self.upper, 1)
        arguments.check_whole("rounds", self.rounds)

    @property
    def room(self):
        return self.upper

    @property
    def correction(self):
        bounds = self.lower, self.upper
        return Correction(*bounds, *bounds, self.rounds)


def sampled(arrays, draws, share, density):
    """Returns thresholds, as keys, from samples with this share of the elements."""
    least = getattr(density, "density", density)
    least = least if isinstance(least, (int, float)) else 0.001
    samples, k = [], []
    for x, draw in zip(arrays, draws, strict=True):
        size = math.ceil(max(share * x.size, min(SEEN / least, x.size)))
        sample = draw.over.join(magnitudes.sample(x, size, draw.seed))
        elements = draw.over.add(jnp.float32(x.size))
        samples.append(sample)
        k.append(jnp.ceil(draw.wanted * (sample.size / elements)).astype(jnp.int32))
    keys = jnp.maximum(selections.kth_of_each(samples, jnp.stack(k)), 1)
    numbers = np.arange(len(samples), dtype=np.int32)
    numbers = hidden(numbers, [x.size for x in arrays], lambda: draws[0].seed)
    return [at_number(keys, i) for i in numbers]

"""The counts on which ranks agree in an exchange, computed in NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import schemes
from sparsejax.schemes.baselines import pulls
from sparsejax.units import ownership
from sparsejax.wire import gathers


def before_messages(held: np.ndarray) -> tuple[int, ...]:
    """Returns the units of the fullest partial sum before each recursive doubling message.

    Args:
        held: bool [n, units]: the units that each rank has at first.
    """
    n, counts = len(held), []
    fold, swaps, unfold = gathers.doubling_schedule(n)
    for pairs in (pairs for pairs in (fold, *swaps, unfold) if pairs):
        counts.append(int(held.sum(1).max()))
        arrived = np.zeros_like(held)
        arrived[[to for _, to in pairs]] = held[[source for source, _ in pairs]]
        held = held | arrived
        if pairs is fold:
            held[[source for source, _ in pairs]] = False
    return tuple(counts)


@functools.cache
def _places(owners: Any, units: int, n: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the owner and the slot of each unit, and the number of slots of an owner."""
    layout = owners.over(units, n, owners.tables(units, n))
    owner, slot = map(np.asarray, jax.jit(layout.assign)(jnp.arange(units)))
    return owner, slot, layout.width


def fullest_of(scheme: Any, mask: np.ndarray) -> tuple[int, ...] | None:
    """Returns the counts on which ranks agree, stage by stage: see `Load.fullest`.

    Args:
        scheme: The scheme.
        mask: bool [n, units]: the units that each rank has.
    """
    n, units, way = len(mask), mask.shape[1], None
    if isinstance(scheme, schemes.Zen):
        scheme = scheme.candidates(n)[0]()
    scheme = getattr(scheme, "_scheme", scheme)
    if isinstance(scheme, schemes.HierarchicalCentralization):
        return before_messages(mask)
    if isinstance(scheme, schemes.OmniReduce):
        owners = ownership.Contiguous(scheme.aggregators)
    elif isinstance(scheme, schemes.BalancedParallelism):
        owners, way = scheme.ownership, scheme.push_pull.way
    else:
        return None
    owner, slot, width = _places(owners, units, n)
    union = mask.any(0)
    of_one = [np.bincount(owner[row], minlength=n).max() for row in mask]
    found = int(max(of_one)), int(np.bincount(owner[union], minlength=n).max())
    if isinstance(way, pulls.Spread):
        share = np.asarray(pulls._SHARES.over(width, n).assign(slot)[0])
        each = np.zeros((n, n), int)
        np.add.at(each, (owner[union], share[union]), 1)
        return *found, int(each.max()), int(each.sum(0).max())
    if isinstance(way, pulls.RecursiveDoubling):
        return *found, *before_messages(union & (owner == np.arange(n)[:, None]))
    return found

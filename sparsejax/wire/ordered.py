"""Which sums over senders are ordered sums.

An ordered sum adds floating-point numbers in a fixed order, so each run has the same bits;
how, and why a scatter-add on a GPU is none, is in `pallas_kernels.reference.ordered`. Where
an owner adds up what several senders have sent, it adds them

    always in order       where another manual mesh axis holds copies of what is summed:
                          each copy has an owner of its own, and all owners must come to the
                          same bits
    by default in order   from up to `MOST_SENDERS` senders; `deterministic=True` says so
                          for any number, `deterministic=False` for none
    in any order          otherwise, on GPUs: by atomic additions

Only owners choose. Schemes without them add in order always, and so does a rank that adds
up entries of its own. On CPUs all sums are ordered.

`MOST_SENDERS` comes from the count of a step on H200s (`benchmarks.device`): a sender costs
a launch of 3 us, and few bytes; 32 of them cost 0.08 to 0.13 ms. At 400 Gbit/s that is
1.6% of the exchange of the paper's LSTM and 4.4% of that of 128 million numbers; 64 would
be 8.7% of the latter. `tests/bench/device` holds the limit of 5% to the record.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from sparsejax.axes import (
    axis_names,
    further_axes,
    is_checking,
    manual_axes,
    varying_axes,
)
from sparsejax.errors import ArgumentError
from sparsejax.wire.collectives import Wire


# Up to this many senders are added in order where nobody says otherwise.
MOST_SENDERS = 32


def is_ordered(wire: Wire, over: frozenset[str]) -> bool:
    """Whether what the ranks of a wire send to an owner is added in order.

    Args:
        wire: The ranks.
        over: The mesh axes over which what they send varies.
    """
    if copies(wire, over):
        return True  # `check` refuses to leave it out
    if wire.deterministic is None:
        return wire.ranks <= MOST_SENDERS
    return wire.deterministic


def copies(wire: Wire, over: frozenset[str]) -> tuple[str, ...]:
    """The manual axes that hold copies of a sum: other axes, over which it does not vary.

    With checking off no type says over which axes anything varies, and each of them may.

    Args:
        wire: The ranks.
        over: The mesh axes over which what is summed varies.
    """
    others = set(manual_axes()) - set(axis_names(wire.axis)) - over
    return tuple(name for name in sorted(others) if lax.axis_size(name) > 1)


def check_placed(wire: Wire, over: frozenset[str], by: str) -> None:
    """Raises where sums must be ordered, and threads of a GPU place what is summed.

    What is sent in one round of an exchange, and what in the next, then differs from run to
    run and from copy to copy, and with it the order of additions.

    Args:
        wire: The ranks.
        over: The mesh axes over which what they send varies.
        by: What places it.
    """
    if wire.at_once and (wire.deterministic or copies(wire, over)):
        raise ArgumentError(
            f"{by} places units in the order of a GPU's threads, so its sums have no fixed "
            "order: they cannot be deterministic=True, nor be those of a gradient of which "
            "another mesh axis holds copies. Use schemes.Zen(), or MurmurHash() without "
            "memory."
        )


def check(wire: Wire, paths: Sequence[str], leaves: Sequence[Any], what: str) -> None:
    """Raises where sums have copies that `deterministic=False` would let diverge.

    Args:
        wire: The ranks.
        paths: The paths of the leaves.
        leaves: What is summed.
        what: The call as the user knows it.
    """
    if wire.deterministic is not False:
        return
    for path, leaf in zip(paths, leaves, strict=True):
        over = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(leaf)))
        # Along axes that are not manual every device computes the same.
        if found := (*copies(wire, over), *further_axes()):
            unknown = "" if is_checking(wire.axis) else ", as far as types tell,"
            raise ArgumentError(
                f"{what}: deterministic=False, and the mesh axis {found[0]!r} holds"
                f"{unknown} copies of the gradient of {path!r}. Each copy has a sum of its "
                "own, and sums in any order differ in their last bits. Leave "
                "deterministic=False out: there sums are ordered."
            )

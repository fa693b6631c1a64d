"""The choice between ordered sums over senders and sums in any order.

An ordered sum adds floating-point numbers in a fixed order, so each run gives equal bits.
`pallas_kernels.reference.ordered` describes how, and why a scatter-add on a GPU is not
ordered. An owner that adds up the entries of several senders adds them

    always in order       where another manual mesh axis holds copies of the gradient: each
                          copy has an owner of its own, and all of these owners must compute
                          the same bits
    by default in order   from up to `MOST_SENDERS` senders; with `deterministic=True` from
                          any number of senders, with `deterministic=False` from none
    in any order          otherwise, on GPUs: by atomic additions

Only owners have this choice. Schemes without owners always add in order, and so does a rank
that adds up its own entries. On CPUs all sums are ordered.

`MOST_SENDERS` is from counts of a step on H200s (`benchmarks.device`): each sender costs a
launch of 3 us and few bytes, so 32 senders cost 0.08 to 0.13 ms. At 400 Gbit/s that is 1.6%
of the exchange of the paper's LSTM and 4.4% of that of 128 million numbers; 64 senders
would be 8.7% of the latter. `tests/bench/device` holds the recorded cost to a limit of 5%.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from sparsejax.axes import axis_names, further_axes, is_checking, manual_axes, varying_axes
from sparsejax.errors import ArgumentError
from sparsejax.wire.collectives import Wire, at_once


# The most senders whose entries are added in order where `deterministic` is None.
MOST_SENDERS = 32


def is_ordered(wire: Wire, over: frozenset[str]) -> bool:
    """Returns whether an owner adds up the entries of several ranks in order.

    Args:
        wire: The ranks.
        over: The mesh axes over which these entries vary.
    """
    if copies(wire, over):
        return True  # `check` has raised for deterministic=False
    if wire.deterministic is None:
        return wire.ranks <= MOST_SENDERS
    return wire.deterministic


def copies(wire: Wire, over: frozenset[str]) -> tuple[str, ...]:
    """Returns the other manual axes over which a sum does not vary: they hold copies of it.

    Where VMA is not checked, types do not tell over which axes an array varies, so any
    other axis may hold copies.

    Args:
        wire: The ranks.
        over: The mesh axes over which the summed array varies.
    """
    others = set(manual_axes()) - set(axis_names(wire.axis)) - over
    return tuple(name for name in sorted(others) if lax.axis_size(name) > 1)


def check_placed(wire: Wire, over: frozenset[str], by: str) -> None:
    """Raises if sums must be ordered, but a GPU's threads choose the order of entries.

    Which entries are sent in which round then differs from run to run and from copy to
    copy, and with it the order of additions.

    Args:
        wire: The ranks.
        over: The mesh axes over which the entries vary.
        by: The name of what orders the entries, for the error message.
    """
    if at_once() and (wire.deterministic or copies(wire, over)):
        raise ArgumentError(
            f"{by} places units in the order of a GPU's threads, so its sums have no fixed "
            "order: they cannot be deterministic=True, nor be those of a gradient of which "
            "another mesh axis holds copies. Use schemes.Zen(), or MurmurHash() without "
            "memory."
        )


def check(wire: Wire, paths: Sequence[str], leaves: Sequence[Any], what: str) -> None:
    """Raises if `deterministic=False` would let copies of a sum diverge.

    Args:
        wire: The ranks.
        paths: The paths of the leaves.
        leaves: The gradients to sum.
        what: The name of the call in the user's code, for the error message.
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

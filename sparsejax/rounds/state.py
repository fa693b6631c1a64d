"""The state of local steps, and its lookup in the state of a chain."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from sparsejax.errors import StateError
from sparsejax.rounds.fragments import Fragments
from sparsejax.state.pending import Period
from sparsejax.state.per_rank import RankState, find


class OuterState(NamedTuple):
    """The state of the outer step of a fragment.

    Attributes:
        sync: The state of the synchronization.
        outer: The state of the outer optimizer, equal on all ranks.
    """

    sync: Any
    outer: Any


class FragmentState(NamedTuple):
    """The part of a state that belongs to one fragment; other leaves are masked.

    Attributes:
        offset: The offsets; see `LocalStepsState`.
        outgoing: The offsets being exchanged; see `LocalStepsState`.
        of_outer: The state of the fragment's outer step.
    """

    offset: RankState
    outgoing: RankState | None
    of_outer: OuterState


class LocalStepsState(NamedTuple):
    """The state of `sparsejax.local_steps`.

    Attributes:
        step: int32: the number of updates so far, equal on all ranks.
        offset: The offsets of the ranks from the anchor: a `RankState` of a tree like the
            parameters, [ranks, ...], float32 or wider.
        inner: The states of the ranks' inner optimizers: a `RankState`.
        outgoing: The offsets as they were when their last exchange began: a `RankState`;
            None without a delay.
        of_outer: The state of the outer step of each fragment of the parameters.
        period: The numbers of steps by which exchanges are in flight; None without a delay.

    Example:
        >>> tx = sparsejax.local_steps(optax.adam(1e-3), every=30)
        >>> opt_state = sparsejax.init(tx, params, mesh)
        >>> opt_state.offset.value["w"].shape == (4, *params["w"].shape)
        True
    """

    step: jax.Array
    offset: Any
    inner: Any
    outgoing: Any
    of_outer: tuple[OuterState, ...]
    period: Period | None = None

    def fragment(self, fragments: Fragments, number: int) -> FragmentState:
        """Returns the part of the state that belongs to one fragment.

        Args:
            fragments: The fragment of each leaf.
            number: The number of the fragment.
        """
        only = lambda held: held.with_value(fragments.only(number, held.value))
        outgoing = None if self.outgoing is None else only(self.outgoing)
        return FragmentState(only(self.offset), outgoing, self.of_outer[number])

    def with_fragments(
        self, fragments: Fragments, states: Sequence[FragmentState]
    ) -> "LocalStepsState":
        """Returns the state with the parts of all fragments replaced.

        Args:
            fragments: The fragment of each leaf.
            states: The new parts, in the order of the fragments.
        """

        def together(held):
            return held[0].with_value(fragments.together([x.value for x in held]))

        outgoing = self.outgoing
        if outgoing is not None:
            outgoing = together([own.outgoing for own in states])
        return self._replace(
            offset=together([own.offset for own in states]),
            outgoing=outgoing,
            of_outer=tuple(own.of_outer for own in states),
        )

    def with_fragment(
        self, fragments: Fragments, number: int, state: FragmentState
    ) -> "LocalStepsState":
        """Returns the state with the part of one fragment replaced.

        Args:
            fragments: The fragment of each leaf.
            number: The number of the fragment.
            state: The new part.
        """
        states = [
            state if n == number else self.fragment(fragments, n)
            for n in range(fragments.count)
        ]
        return self.with_fragments(fragments, states)


def find_state(opt_state: Any, call: str) -> LocalStepsState | None:
    """Returns the state of local steps in a tree; None if it has none.

    Args:
        opt_state: An optimizer's state, or any tree.
        call: The name of the public function, for the message.
    """
    found = find(opt_state, LocalStepsState)
    if len(found) > 1:
        raise StateError(
            f"{call} found {len(found)} states of sparsejax.local_steps, and a rank has "
            "one offset from the anchor: give it the state of one of them. Parameters that "
            "are trained in two ways need one local_steps, with optax.partition as its "
            "inner optimizer."
        )
    return found[0] if found else None

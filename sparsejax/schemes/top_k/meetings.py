"""Recursive doubling with a selection after each exchange.

In a meeting two partners exchange their selections, add them up and select the k largest
elements of the sum, so messages keep one size. gTopk consists of meetings, and so does
SparDL's R-SAG between teams. Both partners add the same two numbers and select by the same
rule, so they have the same bits, and after the last meeting all ranks do.

Every rank that has the same sum knows what the selection after a meeting leaves out: two
ranks after the first meeting, four after the second. One of them adds it to its residual, a
different one from element to element. (In SparDL's paper both partners collect half of it.
After the second meeting four ranks have the sum, so that would collect it twice.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.schemes import base, doubling
from sparsejax.schemes.top_k import base as top_k
from sparsejax.units import bits
from sparsejax.wire import channels
from sparsejax.wire.collectives import Permutation, Wire
from sparsejax.wire.ladder import Ladder


class PartialSum(NamedTuple):
    """A partial sum, selected from after each exchange.

    Attributes:
        kept: [width], the selected elements of the sum, zeros elsewhere.
        left_out: [width], this rank's part of what the selections left out.
        stage: The traffic so far.
    """

    kept: jax.Array
    left_out: jax.Array
    stage: base.Stage

    def then(
        self, x: jax.Array, words: jax.Array, keeper: jax.Array | bool, stage: base.Stage
    ) -> "PartialSum":
        """Returns the partial sum after a selection from a new sum.

        Args:
            x: [width], the new sum.
            words: The selection from it, packed.
            keeper: Booleans [width], where this rank keeps what the selection leaves out.
            stage: The traffic so far.
        """
        selected = top_k.unpacked(words, x.size)[0]
        zero = jnp.zeros_like(x)
        kept = jnp.where(selected, x, zero)
        left_out = jnp.where(selected | ~jnp.asarray(keeper), zero, x)
        return PartialSum(kept, self.left_out + left_out, stage)


def start(x: jax.Array, k: int, seed: jax.Array) -> PartialSum:
    """Selects the k largest elements of x [width], before any exchange."""
    words = top_k.select(x[None], k, seed)
    before = PartialSum(x, jnp.zeros_like(x), base.stage())
    return before.then(x, words, True, before.stage)


def message_sizes(size: int, k: int, dtype: jnp.dtype, code: str) -> Ladder:
    """Returns the message sizes for selections of k from `size` elements."""
    return top_k.cut(size, 1).ladder(k, dtype, code)


def meet(
    before: PartialSum,
    pairs: Permutation,
    k: int,
    seed: jax.Array,
    code: str,
    wire: Wire,
    keeper: jax.Array | bool,
) -> PartialSum:
    """Exchanges selections with a partner, adds them up and selects k elements.

    Args:
        before: The selections.
        pairs: The permutation of the ranks, as pairs (source, target).
        k: The number of elements to select from the sum.
        seed: The seed of the choice among equal elements, the same on all ranks.
        code: The name of the index code, or "auto".
        wire: The ranks.
        keeper: Booleans [width], where this rank keeps what the selection leaves out.
    """
    kept = before.kept
    sizes = message_sizes(kept.size, k, kept.dtype, code)
    channel = channels.swap(wire, [pairs])
    words = bits.pack_all(bits.nonzero(kept))[None]
    # The partner's entries are added to zeros first, so that both add the same two numbers.
    source, starts = top_k.source_of(kept[None]), jnp.zeros(1, jnp.int32)
    arrived, sent = top_k.send_and_add(
        sizes, channel, words, source, starts, jnp.zeros_like(kept)
    )
    both = doubling.one_nan(kept + arrived)
    words = top_k.select(both[None], k, seed)
    stage = base.add_stages(before.stage, base.stage_of(sent))
    return before.then(both, words, keeper, stage)


def keepers(width: int, holder: jax.Array, holders: int) -> jax.Array:
    """Returns booleans [width], where this rank, of those that hold a sum, is the keeper.

    Args:
        width: The number of elements of the sum.
        holder: This rank's number among those that hold the sum.
        holders: The number of ranks that hold the sum.
    """
    # Keepers alternate from element to element, and so also along most strides.
    return lax.iota(jnp.int32, width) % holders == holder

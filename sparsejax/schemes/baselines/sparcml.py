"""SparCML's three sparse all-reduces, of sparse gradients with sparse or dense sums.

Renggli et al., SC 2019; the messages are those of its code. Ranges of units are equal, an
index takes 32 bits, and arrays that no longer pay as entries are sent densely:

    ssar_recursive_doubling  partners swap partial sums, log2 n times (`doubling`)
    ssar_split_all_gather    entries to the ranks that own their ranges, and the sums back
                             by recursive doubling, each message all that is held (`owners`)
    dsar_split_all_gather    the same push; the sums return as a dense array

"ssar" is for sums that stay sparse, and "dsar" for sums that become dense, whose pull has a
known size. Recursive doubling is Zen's Hierarchical Centralization, with SparCML's rule for
dense messages: as soon as twice the entries of the halves would not pay, before it is known
how far they overlap. If the number of ranks is no power of two, ranks are folded.
"""

import dataclasses

import jax

from sparsejax import arguments
from sparsejax.schemes.baselines.pulls import RecursiveDoubling
from sparsejax.schemes.owners.pieces import SparseScheme
from sparsejax.schemes.owners.pulls import Whole
from sparsejax.schemes.zen.balanced import BalancedParallelism
from sparsejax.schemes.zen.hierarchical import HierarchicalCentralization
from sparsejax.units.ownership import Contiguous
from sparsejax.wire import index_codes, ladder


ALGORITHMS = (
    "ssar_recursive_doubling",
    "ssar_split_all_gather",
    "dsar_split_all_gather",
)


@dataclasses.dataclass(frozen=True)
class SparCML(SparseScheme):
    """Sums entries by one of SparCML's three algorithms.

    * "ssar_recursive_doubling": partners exchange partial sums, log2 n times.
    * "ssar_split_all_gather": entries are sent to the owners of equal ranges, and the sums
      are sent back as entries.
    * "dsar_split_all_gather": the same, but the sums are sent back as a dense array.

    Attributes:
        algorithm: The name of the algorithm.
        code: How indices are sent: "coo32" (SparCML's own), "coo16", "coo8", "bitmap", or
            "auto" for the cheapest.
        ratio: The ratio of successive message sizes.
        wire_dtype: The dtype of the values on the wire; if None, as in
            `HierarchicalCentralization` or `BalancedParallelism`.

    Example:
        >>> tx = sparsejax.sync(sparsejax.schemes.SparCML("dsar_split_all_gather"))

    References:
        Renggli et al., SparCML: High-Performance Sparse Communication for Machine Learning,
        SC 2019
    """

    algorithm: str = "ssar_recursive_doubling"
    code: str = "coo32"
    ratio: float = 2.0
    wire_dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self):
        arguments.check_one_of("algorithm", self.algorithm, ALGORITHMS)
        index_codes.parse(self.code)
        ladder.check_ratio(self.ratio)
        arguments.check_dtype("wire_dtype", self.wire_dtype)

    def init(self, like, wire):
        return self._scheme.init(like, wire)

    def __call__(self, x, state, wire):
        return self._scheme(x, state, wire)

    def rows(self, tables, wire, mean=False):
        return self._scheme.rows(tables, wire, mean)

    def forecast(self, load):
        return self._scheme.forecast(load)

    @property
    def _scheme(self):
        if self.algorithm == "ssar_recursive_doubling":
            return HierarchicalCentralization(
                self.code, self.ratio, self.wire_dtype, "bound"
            )
        pull = RecursiveDoubling() if self.algorithm == "ssar_split_all_gather" else Whole()
        return BalancedParallelism(
            Contiguous(), self.code, self.code, self.ratio, self.wire_dtype, pull
        )

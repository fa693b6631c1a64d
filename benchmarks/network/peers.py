"""One host of `benchmarks.network.communication`: PyTorch's gloo with the same sets.

Runs in an environment of its own, with torch and NumPy and without JAX:

    gloo dense        all_reduce of a dense tensor
    gloo sparse       all_reduce of a coalesced sparse COO tensor; a unit is a row
    gloo all-gather   all_gather of indices (int64, as torch has them) and values, padded to
                      the longest, added up on every rank

Finding the entries of a gradient is part of the work here as it is for the library. Sparse
sums stay sparse in torch; they are made dense, as an optimizer of dense parameters needs.
"""

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.data import workloads
from benchmarks.network import torch_side
from benchmarks.network.measure import Settings, measure


class _Peer:
    compiled = 0.0

    def load(self, x: np.ndarray) -> None:
        self._x = torch.from_numpy(x)

    def total(self) -> np.ndarray:
        return self._total.numpy()

    def wire(self) -> None:
        return None

    def _entries(self):
        """The units that are not zero, and their values."""
        x = self._x
        there = x != 0 if x.dim() == 1 else (x != 0).any(dim=1)
        indices = there.nonzero().reshape(-1)
        return indices, x[indices]


class Dense(_Peer):
    name = "gloo dense"

    def run(self) -> None:
        self._total = self._x.clone()
        dist.all_reduce(self._total)


class Sparse(_Peer):
    name = "gloo sparse"

    def run(self) -> None:
        indices, values = self._entries()
        x = torch.sparse_coo_tensor(indices[None], values, self._x.shape, is_coalesced=True)
        dist.all_reduce(x)
        self._total = x.to_dense()


class AllGather(_Peer):
    name = "gloo all-gather"

    def run(self) -> None:
        indices, values = self._entries()
        ranks = dist.get_world_size()
        counts = torch.zeros(ranks, dtype=torch.int64)
        mine = torch.tensor([len(indices)])
        dist.all_gather_into_tensor(counts, mine)
        most = int(counts.max())
        padded = torch.zeros(most, dtype=torch.int64)
        padded[: len(indices)] = indices
        rows = torch.zeros((most, *values.shape[1:]), dtype=values.dtype)
        rows[: len(indices)] = values
        all_indices = torch.zeros(ranks * most, dtype=torch.int64)
        all_rows = torch.zeros((ranks * most, *values.shape[1:]), dtype=values.dtype)
        dist.all_gather_into_tensor(all_indices, padded)
        dist.all_gather_into_tensor(all_rows, rows)
        self._total = torch.zeros_like(self._x)
        for rank, count in enumerate(counts.tolist()):
            entries = slice(rank * most, rank * most + count)
            self._total.index_add_(0, all_indices[entries], all_rows[entries])


def rank(settings: Settings) -> None:
    """Checks and times PyTorch's sides on this host."""
    with torch_side.join() as here:
        by_name = workloads.all_workloads()
        group = [by_name[name] for name in settings.workloads]
        measure(here, settings, [Dense(), Sparse(), AllGather()], group)

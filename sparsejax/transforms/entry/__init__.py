"""Entering a `shard_map` from `jit`: unreduced gradients, or ones stacked by replica."""

from sparsejax.transforms.entry.entry import Entry as Entry, Reduction as Reduction
from sparsejax.transforms.entry.leaves import LeafPlaces as LeafPlaces
from sparsejax.transforms.entry.replicas import per_replica as per_replica

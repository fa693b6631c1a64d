"""Kernels for sparse gradients. `reference` defines what each computes.

The package depends only on JAX and has no communication, so it can be used alone.
"""

from pallas_kernels.backends import use_kernels as use_kernels
from pallas_kernels.errors import (
    BackendError as BackendError,
    KernelArgumentError as KernelArgumentError,
    KernelError as KernelError,
)
from pallas_kernels.hashing import draw_seeds as draw_seeds
from pallas_kernels.operations.bitmap import (
    bitmap_decode as bitmap_decode,
    bitmap_encode as bitmap_encode,
    compact as compact,
)
from pallas_kernels.operations.messages import (
    index_message as index_message,
    pack_message as pack_message,
    unpack_message as unpack_message,
    unpacks_in_kernels as unpacks_in_kernels,
)
from pallas_kernels.operations.partition import partition as partition
from pallas_kernels.operations.partition_dense import partition_dense as partition_dense
from pallas_kernels.operations.threshold_hash import threshold_hash as threshold_hash
from pallas_kernels.reference.partitions import (
    HashMemory as HashMemory,
    Partitioned as Partitioned,
)
from pallas_kernels.reference.specs import (
    MessageSpec as MessageSpec,
    Received as Received,
    SlotSets as SlotSets,
    Unpacking as Unpacking,
)

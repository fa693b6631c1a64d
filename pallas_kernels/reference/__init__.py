"""What each operation computes, in plain XLA: the definition, and the default everywhere.

`bitmap` has which elements there are, `indices` what is computed with lists of indices,
`slots` how a set is listed,
`partitions` how indices are divided among parts, `messages` how they travel, and
`index_message` what is looked up in those. Arguments are checked by the operations of the
package, which call these.
"""

from pallas_kernels.reference.bitmap import (
    EMPTY as EMPTY,
    bitmap_decode as bitmap_decode,
    bitmap_encode as bitmap_encode,
    chosen as chosen,
    compact as compact,
)
from pallas_kernels.reference.index_message import index_message as index_message
from pallas_kernels.reference.indices import (
    MergedRows as MergedRows,
    coo_add as coo_add,
    distinct as distinct,
    merge_rows as merge_rows,
)
from pallas_kernels.reference.messages import (
    pack_message as pack_message,
    unpack_message as unpack_message,
)
from pallas_kernels.reference.partitions import (
    Partitioned as Partitioned,
    partition as partition,
    partition_dense as partition_dense,
    threshold_hash as threshold_hash,
    with_serial as with_serial,
)

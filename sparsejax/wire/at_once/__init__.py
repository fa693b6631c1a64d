"""Packs and unpacks messages of all parts at once, on GPUs and all platforms except CPUs.

`messages` describes the format. There is no loop over entries: as many entries as the
longest message holds are processed for every part, and those that are not real are masked.
A GPU writes a few megabytes of padding in less time than the host needs to decide whether a
loop continues; and kernels do not write the padding: see `pallas_kernels.pack_message`.

A message is unpacked by `pallas_kernels.unpack_message` if the fold has a form that kernels
know (`Into`); otherwise its entries are read and passed to the fold. If a message is sent
in pieces (`unpack_piece`), the first piece has its slots (`Head`), and each other piece has
the values of some entries.

    packing      this rank's messages, whole or with values added where the size is known
    unpacking    messages of any size, and their pieces
    size_groups  the sizes that one program unpacks; of large arrays there are several
    rows         messages of rows, in the order of the array
"""

from sparsejax.wire.at_once.packing import (
    ends_of as ends_of,
    pack as pack,
    prefix as prefix,
    run_of as run_of,
    with_values as with_values,
)
from sparsejax.wire.at_once.size_groups import (
    SizeGroup as SizeGroup,
    groups as groups,
    unpack_rows as unpack_rows,
)
from sparsejax.wire.at_once.unpacking import (
    Head as Head,
    Into as Into,
    are_bitmaps as are_bitmaps,
    in_branches as in_branches,
    spec_of as spec_of,
    unpack as unpack,
    unpack_piece as unpack_piece,
)

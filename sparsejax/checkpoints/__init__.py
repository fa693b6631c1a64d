"""Checkpoints: a state on disk, to resume from on the same number of ranks or another.

On disk: the arrays, numbered, as zarr 3 in one store of OCDBT, each process the chunks that
it has, with a checksum in each; and beside them a description in JSON, of what they are:
the versions that wrote them, for how many ranks they were made, and the state's tree with
its types, shapes and dtypes. Nothing is pickled, and no type of this library is needed to
read the description.

orbax makes the folder, merges what processes have written, and renames it when all have. It
has no option for checksums, and a documented way to say how arrays are written, a
`TypeHandler`: ours writes chunks by TensorStore, with the codecs that have them. So the
process that reads a damaged chunk finds it, whichever part of an array it reads, and can
say where it is, without a word from the others. TensorStore reads: orbax takes six times as
long for hundreds of small arrays, and does not say which it could not read.

`save` is right because it reads back what was written, and compares it with what is in
memory, before the folder gets its name. `restore` is right because it compares the
description with the one of a fresh state before it reads an array: what differs is named,
from both sides. On as many ranks each device then reads its own part. On other ranks what
ranks held is read whole, into memory of the host, and `resized` gives it to those that
there are; all else goes where it belongs at once.

    description   the tree of a state, and its arrays
    comparing     the first difference of two trees
    records       the JSON: written, and checked when read
    chunks        who writes which, and their checksums
    reading       arrays from disk, by TensorStore
    writing       by orbax
    folders       paths, and what is in a folder
    storage       written, read back, and renamed
    together      what one process cannot read, all refuse
    saving, restoring
"""

from sparsejax.checkpoints.restoring import restore as restore
from sparsejax.checkpoints.saving import save as save

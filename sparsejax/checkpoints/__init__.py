"""Checkpoints: a state on disk, to resume from on the same number of ranks or another.

On disk, the arrays are zarr 3 arrays with numbers as names, in one OCDBT store. Each
process writes chunks of its own shards, and each chunk has a checksum. A JSON file beside
them describes the state: the versions that wrote it, the number of ranks for which it was
made, and its tree with types, shapes and dtypes. Nothing is pickled, and the description
can be read without the types of this library.

orbax creates the folder, merges what the processes have written, and renames the folder
when all have finished. It has no option for checksums, but lets a custom `TypeHandler`
write arrays: ours writes chunks by TensorStore, with codecs that add a checksum. So a
process that reads any part of an array detects a damaged chunk, and can name the array,
without communication. Arrays are read by TensorStore alone: orbax takes six times as long
for hundreds of small arrays, and does not say which of them it could not read.

`save` reads back all arrays, and compares them with those in memory, before the folder gets
its name. `restore` compares the description with that of a fresh state before it reads any
array; an error names the first part that differs, as saved and as expected. For the same
number of ranks each device then reads its own part. For another number, state by rank is
read whole, into host memory, and `resized` distributes it over the new ranks; all other
arrays are read to their places directly.

    description   the tree of a state, and its arrays
    comparing     finds the first difference of two descriptions
    records       the JSON file: written, and checked when read
    chunks        which process writes which chunk, and the checksums of chunks
    reading       reads arrays, by TensorStore
    writing       writes arrays and JSON, by orbax
    folders       paths of checkpoints, and the contents of their folders
    storage       writes a checkpoint, reads it back, and renames it
    together      raises on all processes if one of them fails
    saving, restoring
"""

from sparsejax.checkpoints.restoring import restore as restore
from sparsejax.checkpoints.saving import save as save

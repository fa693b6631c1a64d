"""The largest entries of each block, in few bits, by messages of one size.

What SparseLoCo exchanges in each round, and an ordinary lossy synchronization of gradients.

    gradient + decayed residual
      -> blocks       each leaf cut into blocks of one length
      -> dct          the cosine coefficients of each, where they are asked for
      -> selection    the k largest entries of each block
      -> values       in 1 to 32 bits, with a table for each leaf
      -> indices      Elias and Fano's code, 8 bits an entry
      -> message      of all leaves, one array of words: one all-gather
      -> owners       above eight ranks: its pieces to the owners of blocks
      -> aggregate    added in rank order, divided by ranks or by senders
      -> owners       the largest entries of sums, from their owners to all

* `exchange`: all of it, as a `Lossy` for `transforms.feedback`.
* `forecast`: the bytes that `sparsejax.explain` shows.
* `sync`: the transformation.
"""

from sparsejax.chunked.sync import chunked_sync as chunked_sync

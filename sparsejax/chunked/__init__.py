"""Sends the largest entries of each block, in few bits, by messages of constant size.

It is the exchange of each round of SparseLoCo, and a lossy synchronization of gradients.

    gradient + decayed residual
      -> blocks       each leaf is cut into blocks of one length
      -> dct          optionally, cosine coefficients replace the elements of a block
      -> selection    the k largest entries of each block
      -> values       in 1 to 32 bits, with a table for each leaf
      -> indices      Elias-Fano code, 8 bits per entry
      -> message      all leaves in one array of words: one all-gather
      -> owners       above eight ranks: pieces of the message go to the owners of blocks
      -> aggregate    summed in rank order, divided by the number of ranks or of senders
      -> owners       the largest entries of sums go from their owners to all ranks

* `exchange`: the whole exchange, a `Lossy` for `transforms.feedback`.
* `forecast`: the bytes that `sparsejax.explain` shows.
* `sync`: the public transformation.
"""

from sparsejax.chunked.sync import chunked_sync as chunked_sync

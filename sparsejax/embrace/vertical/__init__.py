"""Vertical scheduling: rows that the next step does not read are sent while it runs.

EmbRace, section 4.2.2 and algorithm 1. If the next batch is known, the rows that have a
gradient in a step are of two kinds:

    prior     some rank reads them in the next step: sent and applied before it
    delayed   no rank does: held back on each rank, and sent in the next step

On the wire, for all tables that are sharded by columns, in a step:

    next ids   all_gather   the ids that ranks read in the next step
    prior      all_to_all   to each rank, its columns of this rank's prior rows
    delayed    all_to_all   to each rank, its columns of rows held back in the last step

Lists of prior rows have one of eight lengths. Each rank computes which rows of each rank
are prior or delayed, and so the length, since all have gathered the ids of this step, for
its lookups, and of the next one. So rows are sent without ids. The ids of a batch are
gathered twice, once ahead and once by its lookups, which costs (n - 1) numbers of 32 bits
for each distinct id of a rank, while a row costs 2 (n - 1)/n times its columns.

Why it is correct: delayed rows of a step are not read by any rank in the next one, so they
may arrive at its end. Its forward and backward passes do not depend on them, and vice
versa: XLA can overlap their communication. `sparsejax.lazy` applies them as of their own
step, with its learning rate and its count, before the rows of the next step, which do not
include them. Adam counts one step for both halves. So each step reads the values that it
would read without scheduling, and after the last step, or a `flush`, all rows have them.

A list of delayed rows has a fixed capacity. Rows that do not fit on some rank are prior
rows on all ranks: a row is of one kind everywhere.

* `gradients`: gradients by rows, which stay on their rank, and the ids of a batch.
* `split`: divides rows into prior and delayed ones.
* `sending`: sends columns of rows to the ranks that hold them.
* `sync`: the optax transformation, and `next_ids`: the check of its argument.
* `flushing`: sends and applies the rows that are held back.
* `lookahead`: an iterator over pairs of a batch and the next one.
"""

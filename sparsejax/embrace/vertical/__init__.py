"""Vertical scheduling: rows that the next step does not read are sent while it runs.

EmbRace, section 4.2.2 and algorithm 1. With the next batch known, the rows that a step has
a gradient of are of two kinds:

    prior     some rank reads them in the next step: sent and applied before it
    delayed   none does: held back on each rank, and sent in the next step

On the wire, for all tables with columns on the ranks, in a step:

    next ids   all_gather   the rows that ranks read in the next step
    prior      all_to_all   to each rank, its columns of this rank's prior rows
    delayed    all_to_all   the same of what the step before has held back

Lists of prior rows have one of eight lengths. Which rows of which rank are prior, and which
delayed, and so the length, each rank finds by itself: all have gathered the ids of this
step, for its lookups, and of the next one. So no ids go with rows. The ids of a batch are
gathered twice, once ahead and once by its lookups, which costs (n - 1) numbers of 32 bits
for each distinct id of a rank, where a row costs twice (n - 1)/n times its columns.

Why it is right: delayed rows of a step are read by no rank in the next one, so they may
come at its end. Nothing in its forward and backward pass depends on them, nor they on it:
XLA is free to send them meanwhile. `sparsejax.lazy` applies them as of their own step, with
its learning rate and its count, before the rows of this step, of which they have none.
Adam counts one step for both halves. So what is read is at each step what it would be
without a schedule, and everything is after the last step, or after a `flush`.

A list of delayed rows has fixed room. Rows that have none on some rank go with the prior
ones, on all ranks: a row is of one kind everywhere.

* `gradients`: the gradient as whole rows that stay on their rank, and the rows of a batch.
* `split`: which rows go now.
* `sending`: columns of rows to who holds them.
* `sync`: the optax transformation.
* `flushing`: what is held back is sent and applied.
* `lookahead`: an iterator that knows the next batch.
"""

"""EmbRace: tables that are sharded by columns, and their communication.

Hybrid communication (Li et al., EmbRace, section 4.1). Each rank holds some columns of all
rows of a table. For a lookup in a loss, with n ranks, m distinct ids on a rank, and rows of
d elements, the ranks exchange

    ids        all_gather   the distinct ids of each rank, to all ranks: m numbers
    vectors    all_to_all   to each rank, this rank's columns of the rows that it reads
    gradients  all_to_all   to each rank, its columns of the gradients of these rows

A rank sends 2 (n - 1)/n times m rows of d elements, as in table 2 of the paper, and
(n - 1) m ids, which that table omits. Shapes are static, so without a `capacity` messages
have room for the upper bound of m, min(ids, rows) of a rank, however many ids repeat; with
one they have room for `capacity`, and for min(ids, rows) in a step whose ids do not fit.
Gradients of ids that repeat on a rank are summed before they are sent. Each rank sends and
holds as much as any other, whatever the frequencies of words: all ranks hold columns of
the frequent ones.

Why it is correct: the gradient of a column is the sum of the gradients of this column of
the rows that ranks have read, and all of these are sent to the one rank that holds it. So
after the second exchange a rank has the complete gradient of its columns, summed over the
ranks in one order. No synchronization follows, except for the division by n if the loss is
a mean, which `sparsejax.zen_sync` and all others do. An elementwise optimizer updates the
columns as it would update the whole table, and keeps one n-th of its state on each rank.
The exchange is part of the loss: JAX differentiates an all_to_all into another one.

Horizontal scheduling (section 4.2.1) is in `horizontal`: gradients of dense blocks are
carried into the next step, and those of each block are summed just before its forward pass.

* `column_table`: the table, a node in the tree of parameters.
* `column_lookup`: the lookup, in one table or in several with one exchange.
* `exchange`: sends the lists of a lookup.
* `horizontal`: blocks whose gradients are carried.
* `vertical`: delays rows that the next step does not read: they are sent while it runs.
* `linen`, `nnx`: the lookup as a module of flax; only these import flax.
"""

from sparsejax.embrace.column_lookup import column_lookup as column_lookup
from sparsejax.embrace.column_table import ColumnTable as ColumnTable
from sparsejax.embrace.horizontal import (
    find_order as find_order,
    horizontal as horizontal,
)
from sparsejax.embrace.vertical.flushing import flush as flush, rows_held as rows_held
from sparsejax.embrace.vertical.gradients import (
    rows_read as rows_read,
    value_and_grad as value_and_grad,
)
from sparsejax.embrace.vertical.lookahead import lookahead as lookahead
from sparsejax.embrace.vertical.sync import (
    EmbraceState as EmbraceState,
    embrace_sync as embrace_sync,
)

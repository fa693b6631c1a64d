"""EmbRace: tables that are sharded by columns, and what is sent for them.

Hybrid communication (Li et al., EmbRace, section 4.1). Each rank holds some columns of all
rows of a table. Where a loss looks rows up, with n ranks, m distinct ids on a rank, and
rows of d numbers,

    ids        all_gather   every rank learns which rows every rank wants: m numbers
    vectors    all_to_all   to each rank, this rank's columns of the rows that it wants
    gradients  all_to_all   to each rank, its columns of the gradients of these rows

A rank sends 2 (n - 1)/n times m rows of d numbers, as in table 2 of the paper, and
(n - 1) m ids, which that table leaves out. Shapes are fixed, so without a `capacity` the
wire has room for the most that m can be, min(ids, rows) of a rank, however many repeat;
with one it has room for `capacity`, and for min(ids, rows) in a step whose ids do not fit.
Gradients of ids that repeat on a rank are added up before they are sent. Each rank sends
and holds as much as any other, whatever the frequencies of words: all ranks hold columns
of the frequent ones.

Why it is right: the gradient of a column depends on what ranks did with that column of the
rows that they have read, and all of that arrives at the one rank that holds it. So after
the second exchange a rank has the whole gradient of its columns, summed over the ranks in
one order. No synchronization follows, but for the division by n where the loss is a mean,
which `sparsejax.zen_sync` and all others do. An optimizer that looks at each number alone
does to the columns what it would do to the whole table, and keeps an n-th of its state on
each rank. The exchange is part of the loss: JAX differentiates an all_to_all into one.

Horizontal scheduling (section 4.2.1) is in `horizontal`: gradients of dense blocks are
carried into the next step, and each block's are summed just before its forward.

* `column_table`: the table, a node in the tree of parameters.
* `column_lookup`: the lookup, of one table or of several in one exchange.
* `exchange`: what is sent for it.
* `horizontal`: blocks whose gradients are carried.
* `vertical`: rows that the next step does not read are sent while it runs.
* `linen`, `nnx`: the lookup as a module of flax, imported by who has flax.
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

"""Gradients of tables by the rows that a loss reads, for unchanged losses.

`value_and_grad` traces the loss once and interprets its program twice, with
`sparsejax.tracing`: `reading` finds the leaves that are read by rows only, and where;
`replay` runs the program and adds a zero to the result of each of these lookups, while the
tables themselves are constants. The gradients with respect to the zeros are the rows. No
gradient of the table's size is ever made.

* `lookup`: a lookup that is marked as one in the program.
* `reads`: finds the equations that read whole rows, and the ids of these rows.
* `reading`: makes the plan. An operation that it does not support makes the gradient of a
  leaf dense, as with `jax.grad`.
* `replay`: runs the program by that plan.
* `tiles`: works on long lists of rows tile by tile.
* `capacity`: takes a step with shorter lists of rows where they fit.
* `striped`: a storage order of rows, in which shards of a table are read evenly.

`updates` contains optimizers that update only the rows that have a gradient. `adagrad` is
one that keeps one number per row. `apply` adds rows to tables in place, so that the cost
of a whole step is that of the rows it touches.
"""

from sparsejax.rows.adagrad import rowwise_adagrad as rowwise_adagrad
from sparsejax.rows.apply import apply_updates as apply_updates
from sparsejax.rows.capacity import (
    Capacity as Capacity,
    check_capacity as check_capacity,
    within_capacity as within_capacity,
)
from sparsejax.rows.lookup import lookup as lookup
from sparsejax.rows.striped import StripedRows as StripedRows
from sparsejax.rows.updates.lazy import Lazy as Lazy, lazy as lazy, settle as settle
from sparsejax.rows.value_and_grad import value_and_grad as value_and_grad

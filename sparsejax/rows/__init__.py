"""Gradients of tables by the rows that a loss reads, for unchanged losses.

`value_and_grad` traces the loss once and interprets its program twice, by
`sparsejax.tracing`: `reading` finds the leaves that are read by rows only, and where;
`replay` runs it again and adds a zero to what each of these lookups returns, while the
tables themselves are constants. The gradients with respect to the zeros are the rows. A
gradient of the table's size is nowhere.

* `lookup`: a lookup that says that it is one.
* `reads`: which equations read whole rows, and which rows.
* `reading`: the plan. An operation that it does not support makes a leaf's gradient dense,
  as `jax.grad` has it.
* `replay`: the program by that plan.
* `tiles`: long lists of rows, some of them at a time.
* `capacity`: shorter lists where they fit.
* `striped`: rows stored so that shards of a table are read evenly.

`updates` has what comes after: optimizers that update only the rows that have a gradient.
`adagrad` is one with one number a row. `apply` adds rows to tables in place, so that a
whole step costs what it touches.
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

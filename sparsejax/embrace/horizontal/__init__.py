"""Horizontal scheduling: a block's gradients are reduced just before its forward.

EmbRace (Li et al., section 4.2.1) holds the gradients of dense blocks in a priority queue,
so that the block which the next forward needs first is sent first, and the others are sent
while it computes. XLA has no queue: what a program waits for is its data flow. So the queue
becomes data flow. A step ends with the gradients of this rank, which the state carries; the
next step begins with

    reduce block 1   update block 1   forward of block 1
                     reduce block 2   update block 2   forward of block 2
                                      reduce block 3   ...

and goes on with the loss, the backward, and new gradients to be carried. The forward of a
block needs the reductions of that block and of those before it, and no others: so all
later reductions may be in progress while it computes.

On the wire: what the synchronization in the chain sends for each block by itself, once a
step, block after block. XLA would otherwise combine all reductions into one, for which all
forwards would wait: so the gradients of a block pass a barrier
(`lax.optimization_barrier`) together with the updated parameters of the block before it.
That keeps reductions separate, and in order.

Why it is right: the parameters that a forward sees are those of training without it. They
are updated by the same gradients, from the same parameters and the same optimizer's state,
only later: between two steps the state is one update late, and `flush` catches up. The
chain is applied to each block by itself, with a state of its own. A chain that combines
leaves of several blocks, such as one with `optax.clip_by_global_norm`, would give another
result, and raises an error: its program is analysed, not its name.

A step without gradients to apply, the first or one after a flush, sends zeros and does not
change parameters and states. So all steps are one program without a branch, which XLA
would finish before anything after it.

Tables sharded by columns exchange inside of the loss, and are not carried; nor are leaves
named by `at_once`, which are updated at the end of the step that has their gradients.

* `blocks`: groups leaves into blocks.
* `first_use`: finds the order in which a loss uses blocks.
* `independence`: checks that a chain treats blocks separately.
* `cuts`: a tree cut into blocks.
* `schedule`: the computation of a step, and the state between steps.
* `transformation`: the public transformation.
"""

from sparsejax.embrace.horizontal.first_use import find_order as find_order
from sparsejax.embrace.horizontal.schedule import (
    Begun as Begun,
    HorizontalState as HorizontalState,
)
from sparsejax.embrace.horizontal.transformation import (
    Horizontal as Horizontal,
    horizontal as horizontal,
)

"""What the examples share: their command line, devices, loop, checkpoints, data and report.

* `command`: the options that every example has.
* `devices`: the mesh; what a host gives of a batch.
* `session`: the loop, a run for each synchronization that is asked for.
* `checkpoints`: the state of a run, the last two of them.
* `feeding`: batches in a shuffled order, by grain.
* `files`: the user's own file, and what is wrong with it.
* `report`: the figures of the runs, as a table, as JSON and as a plot.
* `losses`: what several models have.

A model, its loss and the lines with sparsejax stand in the example itself.
"""

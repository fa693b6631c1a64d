"""What the examples share: their command line, devices, loop, checkpoints, data and report.

* `command`: the options that every example has.
* `devices`: the mesh; the share of a batch that a host provides.
* `session`: the loop, a run for each synchronization that is requested.
* `checkpoints`: the state of a run, the last two of them.
* `feeding`: batches in a shuffled order, by grain.
* `files`: the user's own file, and errors in it.
* `report`: the figures of the runs, as a table, as JSON and as a plot.
* `losses`: the losses that several models share.

A model, its loss and the lines with sparsejax are in the example itself.
"""

"""Optimizers that update the rows of tables which have a gradient, and no others.

* `lazy`: what makes an optimizer so; `steps`: its first state, a step, and catching up;
  `optimizer_step`: the step, of short lists at once and of long ones tile by tile.
* `shards`: the same of tables that are sharded by rows, under `jit`.
* `optimizer`: the optimizer inside, which tables it updates by rows, and how they catch up.
* `layout`: which arrays of its state have rows; `facts`: what its update does to them.
* `catch_up`: the steps that rows have missed.
* `snapshot`: its state and the parameters at one step, table by table.
* `reader`: what a loss reads late rows with.
* `call`: a call of the optimizer with rows in place of tables.
* `state`: what is kept.
"""

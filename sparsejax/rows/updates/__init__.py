"""Optimizers that update the rows of tables which have a gradient, and no others.

* `lazy`: the public transformation; `steps`: its init, its update, and catching up;
  `optimizer_step`: one step, of short lists at once and of long ones tile by tile.
* `shards`: a step of tables that are sharded by rows, under `jit`.
* `optimizer`: the optimizer inside, the tables it updates by rows, and how they catch up.
* `layout`: the arrays of its state that have rows; `facts`: the effect of its update on
  them.
* `catch_up`: applies the steps that rows have missed.
* `snapshot`: the state and the parameters at one step, table by table.
* `reader`: reads late rows, which have missed steps, for a loss.
* `call`: calls the optimizer with rows in place of tables.
* `state`: the state.
"""

"""Optimizers that update the rows of tables which have a gradient, and no others.

* `analysis`: what a program does to rows: which it keeps separate, what zeros make of it.
* `anatomy`: which arrays of an optimizer's state have rows, and what a step does to them.
* `catch_up`: the steps that rows have missed.
* `inside`, `state`, `view`: the optimizer that is made lazy, what is kept, and how to read
  the parameters that it trains.
* `steps`: the first state, a step, and catching all rows up.
* `lazy`: what makes an optimizer so.
* `adagrad`: an optimizer with one number a row.
* `apply`: adding updates to parameters.
"""

"""How rows catch up on the steps that they have missed: three methods, one protocol.

In the dense optimizer a step changes all rows of a table, those without a gradient too:
momentum continues, weights decay. For a row that steps do not list, the state records the
last step that it has seen, and the steps since then are applied when it is read or listed
again. `protocol.CatchUp` is the interface of the methods. A table has one method:

* `protocol.Never`: rows do not catch up: they miss nothing, or exact=False.
* `replay.Replay`: the missed steps are taken one by one, by the optimizer itself.
* `fading.Fading`: the missed steps are one sum, by `quadrature`, since momentum fades.

`missed` takes the missed steps: it calls the optimizer with a gradient of zero, and with
the numbers that its state had at that step. `history` records those that only the user
changes.
"""

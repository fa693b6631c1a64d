"""How rows catch up on the steps that they have missed: three methods, one protocol.

A step changes all rows of a table in the dense optimizer, those without a gradient too: a
momentum continues, weights decay. A row that no step lists keeps the number of the last
step that it has seen, and what has become of it since is made up for when it is read or
listed again. `protocol.CatchUp` is their interface. A table has one method:

* `protocol.Never`: nothing is made up for, as nothing is missed, or as with exact=False.
* `replay.Replay`: the missed steps are taken one by one, by the optimizer itself.
* `fading.Fading`: they are one sum, by `quadrature`, as the momentum fades.

`missed` has the steps themselves: the optimizer, run with a gradient of zero, with what its
numbers were then. `history` has those that only the user changes.
"""

"""Local steps: ranks train independently, and exchange their offsets once in each round.

`sparsejax.local_steps` is the transformation, `sparsejax.local` returns the parameters of a
rank. Here are presets with the settings of published methods, and the state.

    state         the state of the transformation, and its lookup in a chain's state
    reading       this rank's parameters: `sparsejax.local`
    inner_steps   the steps between two exchanges, inside `shard_map` and under `jit`
    outer_steps   the exchange, and the step of the anchor
    fragments     parts of the parameters, and when they are sent and applied
    transformation  `local_steps`: inner steps, and the exchanges that are due
    overlap       exchanges that run concurrently with the steps
    checks        checks of arguments and of gradients
    presets       published methods as calls of `local_steps`
    every_step    published methods that exchange a little in every step
"""

from sparsejax.rounds.every_step import demo as demo, flex_demo as flex_demo
from sparsejax.rounds.overlap import Overlap as Overlap
from sparsejax.rounds.presets import (
    diloco as diloco,
    pulse_loco as pulse_loco,
    sparse_loco as sparse_loco,
    streaming_diloco as streaming_diloco,
)
from sparsejax.rounds.state import LocalStepsState as LocalStepsState

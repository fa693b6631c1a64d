"""Charts of the documentation, made of result files; README.md says how."""

import pathlib

from benchmarks.charts import programs, selecting, steps, sums


FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "pictures" / "charts"

# In the order of the page.
CHARTS = {
    made.__name__: made
    for made in (
        *(steps.gains, sums.sums, sums.schemes, sums.density, sums.no_zeros),
        *(steps.in_jit, steps.rows, steps.examples, steps.same_loss, steps.embrace),
        *(selecting.local_steps, selecting.local_clock, selecting.systems),
        *(selecting.accuracy, selecting.sparsifiers, programs.kernels, programs.gpu_steps),
        programs.compiling,
    )
}

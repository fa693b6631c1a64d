"""The page of tables, performance_tables.md, from benchmarks/results.

`python docs/performance.py` writes it with the other pages that are made of records.
"""

import gains
from recorded import ROOT

from tables import programs, steps, sums


PAGE = ROOT / "docs" / "performance_tables.md"
SECTIONS = (
    *(gains.section, sums.on_a_network, sums.by_scheme, sums.by_density),
    *(sums.bytes_sent, sums.dense_costs),
    *(steps.in_jit, steps.end_to_end, steps.in_one_process, steps.workloads),
    *(steps.to_the_same_loss, steps.embrace, steps.local_steps, steps.local_losses),
    *(programs.selecting, programs.accuracy, programs.accuracy_of_sparsifiers),
    *(programs.encoding, programs.kernels, programs.kernels_on_a_gpu),
    *(programs.steps_on_a_gpu, programs.counted),
    *(programs.compiling, programs.compiling_many_leaves, programs.compiling_for_ranks),
)
HEAD = """# Performance: all tables

<!-- Made by `python docs/performance.py` from benchmarks/results: do not edit. -->

The figures of [Performance](performance.md), and all others that are recorded, with the
file that each comes from. Ratios were taken in one run, sides alternating. How everything
was measured, and what is wrong with it, is in `benchmarks/README.md`.
"""


def page():
    parts = [HEAD]
    for section in SECTIONS:
        title, text, rows, results = section()
        sources = results if isinstance(results, tuple) else (results,)
        said = "\n\n".join(each.source() for each in sources)
        parts.append(f"## {title}\n\n{text}\n\n{rows}\n\n{said}\n")
    return "\n".join(parts)

"""The examples' workloads: what they reach, how fast, and beside what.

    python -m benchmarks.workloads                  all parts, and the table
    python -m benchmarks.workloads accuracy         losses after the same steps, three seeds
    python -m benchmarks.workloads network          steps a second on 4 and 16 hosts
    python -m benchmarks.workloads curves           loss over wall-clock on 16 hosts
    python -m benchmarks.workloads table            the table, from what was recorded

What is measured are the examples themselves: their `main` builds the model, the batches and
the trainers, and hands them over (`collected`). EmbRace's tables by columns, which the
examples have not, are put under the same losses (`by_columns`).
"""

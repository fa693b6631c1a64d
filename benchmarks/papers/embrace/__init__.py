"""EmbRace's comparisons: bytes, sizes, balance, training, and time on a network.

    python -m benchmarks.papers.embrace sizes       table 3, and what partitions send
    python -m benchmarks.papers.embrace training    losses and BLEU of every system
    python -m benchmarks.papers.embrace network     steps a second, stall, bytes, memory

Each has its arguments: `python -m benchmarks.papers.embrace sizes --help`. `tasks` are what
is trained, `systems` who trains it, and where a further one is added.
"""

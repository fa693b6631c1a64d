"""Whether reductions may overlap forwards: schedules compiled for described GPUs.

`python -m benchmarks.schedule` compiles a step of a transformer for sixteen H200s, each a
host of its own, with no GPU: with its reductions where XLA puts them, and with horizontal
scheduling (`sparsejax.embrace.horizontal`), XLA's latency-hiding scheduler off and on. It
reads the schedule of each program, says what lies between the start and the end of each
block's reduction, and times the schedule by stated costs.
"""

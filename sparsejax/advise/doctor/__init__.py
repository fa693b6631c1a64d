"""The doctor: it checks whether a job is fit to train, and measures its network.

`command` is `python -m sparsejax doctor`, `examination` the function that it calls, and
`findings` the report. `jobs.start` compares the processes. `ranks` checks the gradient, the
parameters and the plan, and `links` times messages.
"""

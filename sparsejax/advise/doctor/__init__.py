"""Whether a job is fit to train: `doctor` examines it, `check_job` refuses one that is not.

`command` is `python -m sparsejax doctor`, `examination` the function that it calls and
`findings` what it returns. Whether the job comes together is in `jobs.start`. `ranks` is
the gradient, the parameters and the plan, `links` times messages.
"""

"""Whether a job is fit to train: `doctor` examines it, `check_job` refuses one that is not.

`command` is `python -m sparsejax doctor`, `examination` the function that it calls and
`findings` what it returns. `job` compares what the processes of a job say of themselves
(`facts`) by the coordination service's store (`jobs.store`), before any collective;
`coordinator` is what can be known before the job is joined, `launchers` which job that is,
and `roll` who has come.
`ranks` is the gradient, the parameters and the plan, `links` times messages.
"""

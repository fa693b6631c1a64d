"""Whether a job comes together: its coordinator, its processes, and their settings.

`check` compares what the processes of a job say of themselves (`facts`) by the
coordination service's store (`jobs.store`), before any collective; `coordinator` is what
can be known before the job is joined, `launchers` which job that is, and `roll_call` who
has come.
"""

"""Checks of a job at its start: its coordinator, its processes, and their settings.

`check` compares the facts about each process (`facts`) through the coordination service's
store (`jobs.store`), before any collective. `coordinator` checks what it can before JAX
joins the job, which `launchers` finds; `roll_call` finds out which processes are present.
"""

"""Whether a job comes together: its coordinator, its processes, and what they compute with."""

"""Communication between the processes of a job outside of collectives, and comparisons.

`store` exchanges values through the coordination service, which `distributed` takes from
JAX. `versions` lists versions and settings that determine the compiled programs, and
`agreement` compares such values between processes, topic by topic.
"""

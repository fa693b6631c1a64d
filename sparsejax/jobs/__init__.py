"""What the processes of a job exchange outside of collectives, and compare.

`store` is the coordination service's, `distributed` where JAX keeps it, `versions` what
decides which programs a process compiles, `agreement` the comparison of what processes say,
topic by topic.
"""

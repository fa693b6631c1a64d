"""What more ranks cost than there are hosts for: messages, programs, the time of a step.

`rounds` counts what is sent from sets that are drawn, with no formula and no rank; `model`
says what a collective and the work on a host take, from measurements of each by itself;
`python -m benchmarks.network.scale` holds the two against steps that were measured, and
says what a step takes on 128 and 1,024 hosts. `programs` counts what is compiled.
"""

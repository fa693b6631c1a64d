"""Hosts on a network of a given rate, inside one machine.

    python -m benchmarks.testbed --hosts 16 --rate 250mbit -- python -m my.program

Every host is a network namespace with one link to a bridge. `tc` limits that link in both
directions, so bytes take the time that they would take on a cable of that rate; processor
time is shared, all hosts run on this machine's cores. The program runs once in each host,
as one process of a `jax.distributed` job whose collectives go over gloo and TCP; it joins
with `benchmarks.testbed.host.join()`, which also reads the counters of the host's link.

`network` makes and removes the hosts, `job` runs the processes, `host` is the side of the
program. Without root or iproute2 the same job runs over loopback, and says "unshaped".
"""

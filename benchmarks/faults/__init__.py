"""Faults of hosts that train: what ends, how fast, with which words, and what is lost.

    python -m benchmarks.faults
    python -m benchmarks.faults --schemes zen --faults kill cut --seed 3

Each case is a job on the testbed that trains from made-up gradients, keeps checkpoints
by `sparsejax.save`, and runs in `watch_job`. At a random step, and at a random time in
it, something befalls one host. A host that is lost has to end the job on all hosts, by
its name and in the time that is stated, and so has one that exits with status 0 or
leaves its block before the others; the hosts that are left go on from the last
checkpoint by `sparsejax.restore`. There, and at the end, what was applied and what
ranks hold back has to be the sum of the gradients computed up to that step, or what the
optimizer makes of them (`books`), and parameters the same bytes on all hosts. A host that
is slow, or stopped for less than the time of silence, ends nothing.

By local steps (`diloco`, `sparse_loco`) a job goes on from the last checkpoint alike,
within a round or at its end. There, and at the end of a job that nothing ended, anchors are
the same bytes as those of a job that nothing befell. `--moments round exchange save` has
hosts befallen in the first step of a round, in the last one, which exchanges, and while all
save.
"""

"""A machine that executes the PTX of kernels on a CPU, in random orders.

Interpreters of Triton and of Pallas run a kernel's source, one program after another. What
a GPU is given is another program, made by a compiler, and warps run it in any order. This
machine runs that program:

    program     the text of PTX, read into instructions
    lanes       what instructions compute: functions of the 32 lanes of a warp
    memory      buffers: bounds, alignment, what was written, and conflicts between threads
    machine     a launch: blocks, warps, barriers, stores that become visible late
    orders      which warp goes next, from a seed; the shortest order that shows a fault
    compiler    from kernels of Triton, and from Pallas' lowered kernels, to PTX
    launches    the machine in place of a GPU where kernels are launched

What it cannot show: faults of `ptxas`, which translates PTX for one GPU; a load that finds
what was there before a store that is visible, as a missing acquire allows; and time.
"""

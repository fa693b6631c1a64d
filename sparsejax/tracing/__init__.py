"""Traced programs: one interpreter of jaxprs for every question that is asked of one.

`interpret` follows the equations of a program in their order. What stands for an array, and
what an equation makes of it, is a `Domain`: a value may be the array itself, or what is
known of it, as which parameters it depends on. By its name and its parameters an equation
is of a kind (`programs.kind_of`, the one table), and a domain has a method for each:

    call        jit, closed_call               a program with all inputs of the equation
    remat       remat, checkpoint              a call that is run again when differentiated
    custom      custom_jvp, custom_vjp         a call with a derivative of its own
    cond        cond, switch                   one of several programs
    scan        scan                           a program once a turn
    other       all else

A call is followed as it stands, and of a conditional all branches are, of which a domain
joins the outputs. What a loop makes of a value depends on the domain: without a method of
its own a scan is like any equation that is not known. So are `while`, `shard_map` and what
has a parameter that is not known, for all domains: each takes the worst of them.

* `programs`: what the versions of JAX call the parts of a program.
* `interpreter`: `interpret`, and `Domain`.
* `outputs`: programs without what their outputs do not depend on.
"""

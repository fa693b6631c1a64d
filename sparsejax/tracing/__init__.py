"""Traced programs: one interpreter of jaxprs, which every analysis of them uses.

`interpret` evaluates the equations of a program (a jaxpr) in order. A `Domain` defines the
values that stand for arrays and the results of equations: a value may be the array itself,
or what is known of it, such as the parameters on which it depends. The name and the
parameters of an equation determine its kind (`programs.kind_of`, the only table of these),
and a domain has a method for each kind:

    call        jit, closed_call               a program with all inputs of the equation
    remat       remat, checkpoint              a call that is run again when differentiated
    custom      custom_jvp, custom_vjp         a call with a derivative of its own
    cond        cond, switch                   one of several programs
    scan        scan                           a program once an iteration
    other       all else

By default a domain interprets a call inline, and all branches of a conditional, whose
outputs it joins. The result of a loop depends on the domain: one that does not override
`scan` treats it like an unknown equation. `while`, `shard_map` and equations with unknown
parameters are unknown to all domains, which assume the worst of them.

* `programs`: the names that versions of JAX give to the parts of a program.
* `interpreter`: `interpret`, and `Domain`.
* `outputs`: programs without equations on which no output depends.
"""

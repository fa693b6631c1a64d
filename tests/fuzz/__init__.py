"""Cases drawn by hypothesis, against the law in NumPy's float64; see `__main__`.

A *program* is a scheme, its options, a wrapper, ranks, shapes and a dtype: compiled once
and used for many cases. A *case* is a program and what it is given. Programs are drawn from
a seed (`pool`), what they are given by hypothesis (`data`, `words`), `laws` says what must
hold, and `ways` which ways some case must go.
"""

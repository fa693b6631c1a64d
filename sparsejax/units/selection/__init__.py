"""Which units of a gradient a sparsifier selects, and what it makes of them."""

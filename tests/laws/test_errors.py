"""The checks of arguments: each names the argument, what it may be, and its value."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import arguments, errors


REFUSED = [
    (arguments.check_whole, (0, 1), "x must be a positive int, got 0"),
    (arguments.check_whole, (-1, 0, " or None"), "x must be an int of at least 0 or None"),
    (arguments.check_whole, (1.5,), "x must be an int, got 1.5"),
    (arguments.check_whole, (True,), "x must be an int, got True"),
    (arguments.check_positive, (0,), "x must be above 0, got 0"),
    (arguments.check_positive, (math.nan,), "x must be above 0, got nan"),
    (arguments.check_positive, (3, 1, 2), "x must be above 1 and at most 2, got 3"),
    (arguments.check_at_least, (-1,), "x must be at least 0, got -1"),
    (arguments.check_at_least, (math.inf, 2), "x must be at least 2, got inf"),
    (arguments.check_at_least, ("1",), "x must be at least 0, got '1'"),
    (arguments.check_between, (3, 0, 2), r"x must lie in \[0, 2\], got 3\. See errors"),
    (arguments.check_between, (3, 0, 2, "It is a share."), r"got 3\. It is a share\."),
    (arguments.check_share, (0,), r"x must lie in \(0, 1\], got 0"),
    (arguments.check_share, (1.5,), r"got 1.5 \(0.01 is one per cent\)"),
    (arguments.check_share, ("1",), r"x must be a number in \(0, 1\], got '1'"),
    (arguments.check_density, (lambda step: 0.1,), "x is a schedule"),
    (arguments.check_one_of, ("c", {"a": 1, "b": 2}), "x must be one of 'a', 'b', got 'c'"),
    (arguments.check_dtype, ("int8",), "x must be a floating dtype of at least 16 bits"),
    (arguments.check_dtype, ("float8_e4m3fn",), "x must be a floating dtype"),
    (arguments.check_dtype, ("nothing",), "such as jnp.bfloat16, got 'nothing'"),
    (arguments.check_positive, (jnp.ones(()),), "x must be a Python value"),
]


@pytest.mark.parametrize(("check", "arguments", "match"), REFUSED)
def test_a_value_that_cannot_be_is_refused(check, arguments, match):
    with pytest.raises(errors.ArgumentError, match=match):
        check("x", *arguments)


def test_values_at_the_bounds_are_taken():
    arguments.check_whole("x", 1, 1)
    arguments.check_positive("x", np.float32(2), 1, 2)
    arguments.check_positive("x", math.inf)
    arguments.check_at_least("x", np.int64(0))
    arguments.check_between("x", 0, 0, 2)
    arguments.check_share("x", 1)
    arguments.check_density("x", 1e-9)
    arguments.check_one_of("x", None, (None,))
    arguments.check_dtype("x", None)
    arguments.check_dtype("x", jnp.bfloat16)

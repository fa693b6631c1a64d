"""A model that is another one on each process."""

import jax
import numpy as np


def model():
    return {"w": np.full(3, jax.process_index(), np.float32), "b": np.zeros(2, np.float32)}

"""Lists of rows: ids that ranks may list, and an oracle of their sums."""

import jax.numpy as jnp
import numpy as np

from sparsejax.units.ownership import StripedHash
from tests.helpers.oracle import assert_within


def listed_ids(n: int, height: int, count: int) -> dict[str, np.ndarray]:
    """Returns, by name, ids int32 [n, count] of a table of `height` rows; most repeat."""
    rng = np.random.default_rng(1)
    apart = np.arange(n * count).reshape(n, count)
    assert apart.size < height
    cases = {
        "uniform": rng.integers(0, height, (n, count)),
        "zipf": np.minimum(rng.zipf(1.3, (n, count)), height) - 1,
        "of one owner": of_one_owner(n, height, count),
        "one row": np.zeros((n, count)),
        "none": np.full((n, count), height),
        "out of range": rng.integers(-height, 3 * height, (n, count)),
        "same": np.tile(rng.permutation(height)[:count], (n, 1)),
        "apart": apart,
        "one rank alone": np.where(np.arange(n)[:, None] == n - 1, apart, height),
    }
    return {name: np.asarray(ids, np.int32) for name, ids in cases.items()}


def of_one_owner(n: int, height: int, count: int) -> np.ndarray:
    """Returns ids [n, count] that a striped hash gives to one rank; they may repeat."""
    units = jnp.arange(height, dtype=jnp.int32)
    parts, _ = StripedHash().over(height, n).assign(units)
    own = np.flatnonzero(np.asarray(parts) == n - 1)
    return np.stack([np.resize(np.roll(own, -rank), count) for rank in range(n)])


def drawn_rows(ids, width: int, dtype="float32", seed: int = 0) -> np.ndarray:
    """Draws a row for each id."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((*ids.shape, width)).astype(jnp.dtype(dtype))


def assert_sum_of_rows(total, ids, rows, height: int, room: float, where: str = "") -> None:
    """Raises unless a sum has exactly the ids that are listed, each with its rows' sum.

    Args:
        total: The ids and the rows of the sum.
        ids: int [n, k], the ids that ranks listed.
        rows: [n, k, width], their rows.
        height: The number of rows of the table.
        room: The tolerance of a sum, as a share of the sum of magnitudes.
        where: The name of the case, for messages.
    """
    listed, sums = total[0], total[1].astype(np.float64)
    real = listed < height
    inside = (ids >= 0) & (ids < height)
    assert sorted(listed[real]) == sorted(set(ids[inside].tolist())), where
    assert (listed >= 0).all(), where
    assert not sums[~real].any(), where
    exact, scale = np.zeros((2, height, rows.shape[-1]))
    np.add.at(exact, ids[inside], rows[inside].astype(np.float64))
    np.add.at(scale, ids[inside], np.abs(rows[inside].astype(np.float64)))
    of_listed = exact[listed[real]]
    assert_within(sums[real], of_listed, room * scale[listed[real]], where)

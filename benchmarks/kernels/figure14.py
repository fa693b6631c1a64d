"""Figure 14 of Zen: the cost of Algorithm 1 by its memory and its number of hashes."""

import functools
import pathlib
import statistics
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as kernels
from benchmarks.harness import figure, timing
from benchmarks.harness.record import Recorder, say
from benchmarks.kernels.compiled import together
from benchmarks.kernels.operations import REPEATS, SIZE, gradient, hashed
from pallas_kernels import rank_select
from pallas_kernels.reference.bitmap import bitmap_decode


DENSITIES = (0.01, 0.1, 0.02, 0.05)  # its ends first


def memory(
    record: Recorder,
    size: int = SIZE,
    folder: pathlib.Path | None = None,
    names: Sequence[str] = ("reference",),
    sample: float = 0.1,
) -> None:
    """Figure 14: the cost by r1 at k = 3, and by k at r1 = 2 x, with the reading out.

    Args:
        record: For the rows.
        size: Parameters.
        folder: For the figure, instead of benchmarks/results.
        names: Backends.
        sample: Seconds of a sample.
    """
    rows = []
    cases = [("r1", m, 3, m) for m in (1.0, 1.5, 2.0, 3.0, 4.0)]
    cases += [("k", k, k, 2.0) for k in (1, 2, 3, 4, 5)]
    seeds = jnp.asarray(kernels.draw_seeds(6))
    for density in DENSITIES:
        indices = jnp.asarray(np.flatnonzero(gradient(density, size)), jnp.int32)
        say(f"\nfigure 14: {size:,} parameters, {density:.0%}, {indices.size:,} indices")
        sides = together(
            {
                (backend, *case): (
                    functools.partial(
                        _read_out, backend=backend, memory=hashed(indices, *case[2:])
                    ),
                    indices,
                    seeds,
                )
                for case in cases
                for backend in names
            }
        )
        shares = {}
        for (backend, axis, value, k, times), run in sides.items():
            stored, serial, left = run()
            assert not left.any() or times < 1.5 or k < 3, "the paper's memory overflows"
            assert _once(indices, stored, left), (
                f"{backend}: an index is there twice, or nowhere"
            )
            shares[backend, axis, value, k, times] = float(serial)
        for side, taken in timing.alternate(sides, REPEATS, sample).items():
            backend, axis, value, *_ = side
            row = {"backend": backend, "density": density, "axis": axis, "value": value}
            row |= {"serial": shares[side], "seconds": statistics.median(taken)}
            rows.append(row | {"low": min(taken), "high": max(taken)})
            record.add(part="figure 14", **rows[-1])
            name = f"{backend}, {axis} = {value:g}" + (" x" if axis == "r1" else "")
            say(f"  {name:20} {timing.spread(taken):34} {row['serial']:6.2%} serial")
        _draw(rows, size, folder)


def _read_out(indices, seeds, *, backend, memory):
    """Algorithm 1, and the indices in the order of the memory."""
    done = kernels.partition(indices, indices.size, seeds, memory, backend=backend)
    flat = done.memory.reshape(-1)
    words = rank_select.pack(jnp.pad(flat >= 0, (0, -flat.size % 32)))
    at, _ = bitmap_decode(words, indices.size, fill=flat.size)
    stored = flat.at[at].get(mode="fill", fill_value=-1)
    return stored, jnp.sum(done.counts) / indices.size, done.left


@jax.jit
def _once(indices, stored, left):
    """Whether each index is either stored or left, once."""
    highest = jnp.iinfo(jnp.int32).max
    listed = jnp.where(stored < 0, highest, stored)
    both = jnp.concatenate([listed, jnp.where(left, indices, highest)])
    return (jnp.sort(both)[: indices.size] == indices).all()


def _draw(rows: list[dict], size: int, folder: pathlib.Path | None) -> None:
    names = list(dict.fromkeys(row["backend"] for row in rows))
    image, panels = figure.panels(len(names), 2, (4.5, 3.2), sharey=True)
    titles = {"r1": "Memory r1, times the indices (k = 3)", "k": "Hashes k (r1 = 2 x)"}
    for of_backend, backend in zip(panels, names, strict=True):
        for axes, (axis, title) in zip(of_backend, titles.items(), strict=True):
            for density in sorted({row["density"] for row in rows}):
                case = {"backend": backend, "axis": axis, "density": density}
                line = [row for row in rows if case.items() <= row.items()]
                axes.plot(
                    [row["value"] for row in line],
                    [1e3 * row["seconds"] for row in line],
                    marker="o",
                    label=f"{density:.0%}",
                )
            axes.set_xlabel(title)
            axes.grid(alpha=0.3)
        of_backend[0].set_ylabel(f"{backend}: ms, with reading out")
        of_backend[0].set_ylim(bottom=0)
    panels[0, 1].legend(title="density", loc="center left", bbox_to_anchor=(1.0, 0.5))
    image.suptitle(f"Algorithm 1, {size:,} parameters, {jax.devices()[0].device_kind}")
    name = f"kernels-figure14-{jax.default_backend()}"
    figure.save(name, rows, image, folder)

"""The exchange of chunks in NumPy's float64, written from its formulas, entry by entry."""

import functools

import numpy as np


def divisor(size, most):
    return max(d for d in range(1, most + 1) if size % d == 0)


def blocks_of(shape, k, chunk):
    """The flat indices of each block of a leaf, and how many of a block are kept."""
    side = round(chunk**0.5)
    matrix = shape if len(shape) > 1 else (1, *shape, *[1] * (1 - len(shape)))
    *_, rows, columns = matrix
    numbers = np.arange(np.prod(matrix, dtype=int)).reshape(-1, rows, columns)
    height, width = divisor(rows, side), divisor(columns, side)
    found = [
        one[i : i + height, j : j + width].reshape(-1)
        for one in numbers
        for i in range(0, rows, height)
        for j in range(0, columns, width)
    ]
    return found, max(1, round(height * width * k / chunk))


def cosines(x, k, chunk, back=False):
    """The orthonormal DCT-II of each block of a leaf, or its inverse."""
    side = round(chunk**0.5)
    rows, columns = ((1, 1, *x.shape))[-2:]
    sides = divisor(rows, side), divisor(columns, side)

    def basis(n):
        waves = [
            [np.cos(np.pi * (2 * i + 1) * f / (2 * n)) for i in range(n)] for f in range(n)
        ]
        return np.array(waves) * np.sqrt([1 / n] + [2 / n] * (n - 1))[:, None]

    down, across = map(basis, sides)
    if back:
        down, across = down.T, across.T
    out = np.zeros(x.size)
    for places in blocks_of(x.shape, k, chunk)[0]:
        out[places] = (down @ x.reshape(-1)[places].reshape(sides) @ across.T).reshape(-1)
    return out.reshape(x.shape)


def selected(x, k, chunk):
    """The flat indices of what is sent of a leaf: of equal magnitudes the first."""
    found, kept = blocks_of(x.shape, k, chunk)
    flat = np.abs(x.reshape(-1))
    by_size = [block[np.argsort(-flat[block], kind="stable")[:kept]] for block in found]
    return np.concatenate([np.sort(places) for places in by_size])


def two_levels(x):
    magnitude = np.abs(x)
    above = magnitude > magnitude.mean()
    levels = [magnitude[flags].mean() if flags.any() else 0 for flags in (~above, above)]
    return np.where(x < 0, -1, 1) * np.where(above, levels[1], levels[0])


def four_bins(x):
    spread = x.std(ddof=1) if x.size > 1 else 0
    width = 6 * spread / 4
    bins = np.clip(np.round((x - x.mean()) / (width or 1) + 2), 0, 3)
    means = [x[bins == i].mean() if (bins == i).any() else 0 for i in range(4)]
    return np.array(means)[bins.astype(int)]


def int8(x):
    step = np.abs(x).max() / 127
    return np.round(x / (step or 1)) * step


def floating(x, bits, least):
    """The nearest of so many significant bits, no finer than the least exponent has."""
    exponent = np.frexp(x)[1] - 1
    step = 2.0 ** (np.maximum(exponent, least) - bits + 1)
    return np.round(x / step) * step


def minifloat(x):
    """float8_e4m3fn of numbers that are scaled to end at 448, by its definition."""
    scale = np.abs(x).max() / 448 or 1
    magnitude = np.abs(x) / scale
    exponent = np.floor(np.log2(np.where(magnitude > 0, magnitude, 1)))
    step = 2.0 ** (np.maximum(exponent, -6) - 3)
    return np.sign(x) * np.round(magnitude / step) * step * scale


def powers(x):
    """Zero, or the nearest power of two from 1/8 to 8 times the mean, by its logarithm."""
    mean = np.abs(x).mean() or 1
    octaves = np.log2(np.maximum(np.abs(x) / mean, 1e-30))
    nearest = np.minimum(np.floor(octaves + 0.5), 3)
    return np.where(nearest < -3, 0, np.sign(x) * 2.0**nearest * mean)


# What comes back of a leaf, by code.
QUANTIZED = {
    "float32": lambda x: x,
    "bfloat16": functools.partial(floating, bits=8, least=-126),
    "float16": functools.partial(floating, bits=11, least=-14),
    "int8": int8,
    "fp8": minifloat,
    "4bit": powers,
    "2bit": two_levels,
    "2bit-bins": four_bins,
    "sign": lambda x: np.where(x < 0, -1, 1) * np.abs(x).mean(),
}


def rounds(grads, weights, *, k, chunk, values, over, decay, clip=False, transform=None):
    """What each round returns, and what each rank holds after it.

    Args:
        grads: By leaf [ranks, rounds, ...].
        weights: [ranks, rounds].

    Returns:
        By leaf the totals [rounds, ...], and the residuals [rounds, ranks, ...].
    """
    totals, residuals = {}, {}

    def turned(x, back=False):
        return x if transform is None else cosines(x, k, chunk, back)

    for name, given in grads.items():
        given = given.astype(np.float64)
        held = np.zeros((len(given), *given.shape[2:]))
        totals[name], residuals[name] = [], []
        for turn in range(given.shape[1]):
            weight = weights[:, turn].astype(np.float64)
            accumulated = decay * held + given[:, turn]
            sent = np.zeros((len(given), held[0].size))
            flags = np.zeros(sent.shape)
            for rank, x in enumerate(map(turned, accumulated)):
                places = selected(x, k, chunk)
                flags[rank, places] = 1
                sent[rank, places] = QUANTIZED[values](x.reshape(-1)[places])
            if clip:
                norms = np.linalg.norm(sent, axis=1)
                most = np.median(norms[weight != 0])
                sent *= np.minimum(1, most / norms)[:, None]
            sent[weight == 0] = 0
            divisor = weight @ flags if over == "senders" else weight.sum()
            total = weight @ sent / np.where(divisor == 0, 1, divisor)
            sent = [turned(x, back=True) for x in sent.reshape(held.shape)]
            held = accumulated - np.stack(sent)
            totals[name].append(turned(total.reshape(held.shape[1:]), back=True))
            residuals[name].append(held)
    stack = lambda tree: {name: np.stack(x) for name, x in tree.items()}
    return stack(totals), stack(residuals)

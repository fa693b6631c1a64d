"""Every example at a size at which it takes seconds, and data of the user's own for it."""

import importlib
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest


class Example(NamedTuple):
    """A small version of an example.

    Attributes:
        size: In place of its size "small".
        data: Writes a file of the user's into a folder, and returns the options that name
            it.
        syncs: What it is trained with for longer, the dense one first.
        resumed: The one that is stopped and goes on.
        devices: How many there are.
    """

    size: Any
    data: Callable[[Path], list[str]]
    syncs: Sequence[str] = ("dense", "zen", "rows")
    resumed: str = "rows"
    devices: int = 2


def text(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    path = folder / "text.txt"
    words = [f"word{i}" for i in rng.zipf(1.3, 3_000) % 300]
    lines = [" ".join(words[i : i + 10]) for i in range(0, len(words), 10)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return ["--data", str(path)]


def click(rng: np.random.Generator) -> str:
    """A line of a log in the format of Criteo's; some fields are empty."""
    numbers = ["" if x < 0 else str(x) for x in rng.integers(-5, 500, 13)]
    categories = [f"{x:08x}" for x in rng.zipf(1.5, 26) % 90]
    clicked = int(categories[0] < "00000003")
    return "\t".join([str(clicked), *numbers, *categories])


def log(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    path = folder / "log.tsv"
    path.write_text("".join(f"{click(rng)}\n" for _ in range(200)), encoding="utf-8")
    return ["--data", str(path)]


def pairs(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    numbers = [rng.zipf(1.4, rng.integers(2, 8)) % 60 for _ in range(200)]
    paths = [folder / "text.en", folder / "text.de"]
    for path, word in zip(paths, ("word", "wort"), strict=True):
        lines = [" ".join(f"{word}{i}" for i in line) for line in numbers]
        path.write_text("\n".join(lines), encoding="utf-8")
    return ["--data", *map(str, paths)]


def images(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 100)
    pixels = rng.random((100, 8, 8)) + np.eye(8)[labels][:, :, None]
    path = folder / "images.npz"
    np.savez(path, images=pixels, labels=labels)
    return ["--data", str(path)]


def labeled(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    lines = ["100 300 500"]
    for label in rng.zipf(1.5, 100) % 500:
        features = {label % 300, *rng.integers(0, 300, 3).tolist()}
        lines.append(f"{label},{(label + 1) % 500} " + " ".join(f"{f}:1" for f in features))
    path = folder / "examples.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return ["--data", str(path)]


# Tables and layers are large enough to be sent sparsely, all else is as small as can be.
LOSSLESS = {"dense", "zen", "rows"}
EXAMPLES = {
    "language_model": Example((9_000, 8, None), text),
    "click_model": Example((20_000, 4, (8,), 16), log, ("dense", "rows")),
    "translation": Example((9_000, 8, 8, 8, 16), pairs, ("dense", "rows")),
    "digits_vgg": Example((((96, 96),), 1, 8), images, ("dense", "spardl"), "spardl"),
    "extreme_classification": Example(
        (16, 8, 5_000, 5_000), labeled, ("dense", "dragonn"), "dragonn"
    ),
    "transformer_tp": Example((600, 256, 1, 2, 8, 4), text, ("dense", "dgc"), "dgc", 4),
}


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard would show of a run: by name, the value of each step."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = folder.glob("events.out.tfevents.*")
    rest, found = file.read_bytes(), {}
    while rest:  # of records: a length and its checksum, the data and theirs
        (size,) = struct.unpack("<Q", rest[:8])
        event, rest = Event.FromString(rest[12 : 12 + size]), rest[16 + size :]
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def run(name: str, monkeypatch, folder: Path, *options: str) -> Any:
    """Runs an example on a few devices; returns its runs by synchronization."""
    example = EXAMPLES[name]
    module = importlib.import_module(f"examples.{name}")
    monkeypatch.setitem(module.SIZES, "small", example.size)
    given = [*example.data(folder), "--devices", str(example.devices), "--json"]
    return module.main([*given, *options]).runs


def refused(function: Callable[..., Any], *args: Any) -> str:
    """Calls what ends the script; returns the sentence with which it does."""
    with pytest.raises(SystemExit) as error:
        function(*args)
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence

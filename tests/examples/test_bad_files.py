"""What is wrong with a file of the user's is said in one sentence, with the line."""

import importlib
import pathlib

import numpy as np
import pytest

from examples.common import files
from examples.data import criteo, labeled, sentences, text
from tests.examples import tiny
from tests.examples.tiny import refused


def write(folder, content):
    path = folder / "data.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def all_lines(path):
    return list(files.lines(path))


def test_a_file_that_is_missing(tmp_path):
    path = str(tmp_path / "none.txt")
    for read in (all_lines, lambda path: files.arrays(path, "images")):
        assert refused(read, path) == f"{path} cannot be read: No such file or directory."


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_a_file_that_is_empty(tmp_path, content):
    path = write(tmp_path, content)
    assert refused(all_lines, path) == f"{path} has nothing in it."


def test_a_file_of_another_encoding(tmp_path):
    path = write(tmp_path, "good\nÄrger\n".encode("latin1"))
    assert "line 2: it is not UTF-8 text (byte 0xc4)" in refused(all_lines, path)
    path = write(tmp_path, "a text".encode("utf-16"))
    assert "line 1: it is not UTF-8 text (byte 0xff)" in refused(all_lines, path)
    path = write(tmp_path, "a text".encode("utf-16-le"))
    assert "line 1: there is a zero byte" in refused(all_lines, path)
    path = write(tmp_path, "a text\r\n".encode("utf-8-sig"))
    assert all_lines(path) == [(1, "a text")]


def test_a_text_that_is_too_short(tmp_path):
    path = write(tmp_path, "three short words")
    assert refused(text.read, path, 10, 4) == f"{path} has 3 words, and 4 are needed."


def test_two_texts_of_other_lengths(tmp_path):
    paths = []
    for name, content in (("en", "one\n\nthree\n"), ("de", "eins\n\n")):
        (tmp_path / name).write_text(content)
        paths.append(str(tmp_path / name))
    assert f"{paths[0]} has 3 lines and {paths[1]} has 2" in refused(sentences.read, *paths)
    assert sentences.read(paths[0], paths[0])[1] == ([], [])


def broken(at, value):
    """A good line and one with another field."""
    good = tiny.click(np.random.default_rng(0))
    fields = good.split("\t")
    fields[at] = value
    return good + "\n" + "\t".join(fields) + "\n"


def test_a_log_with_a_malformed_line(tmp_path):
    path = write(tmp_path, broken(0, "yes"))
    assert f"{path}, line 2: its click is 'yes'" in refused(criteo.read, path, 9)
    path = write(tmp_path, broken(3, "1.5"))
    assert "line 2: its field 4 is '1.5', no whole number" in refused(criteo.read, path, 9)
    path = write(tmp_path, broken(3, "1\t2"))
    assert "line 2: it has 41 fields between tabs, and is to have 40" in refused(
        criteo.read, path, 9
    )
    examples, sha256 = criteo.read(path, 1)  # What is not read is not looked at.
    assert examples["categories"].shape == (1, 39)
    assert len(sha256) == 64


def test_examples_with_a_malformed_line(tmp_path):
    cases = {
        "many\n": "line 1: it is 'many', and is to be three whole numbers",
        "1 10 5\n7 0:1\n": "line 2: it is '7 0:1', and is to be labels below 5",
        "1 10 5\n\n3 10:1\n": "line 3: it is '3 10:1', and is to be labels below 5",
        "1 10 5\n3 1\n": "line 2: it is '3 1'",
        "1 10 5\n 1:1\n": "has no example with features and labels",
    }
    for content, sentence in cases.items():
        assert sentence in refused(labeled.read, write(tmp_path, content))
    found = labeled.read(write(tmp_path, "1 10 5\n3,4 1:3 9:-4\n"))
    assert found.labels[0].tolist() == [3, 4, *[-1] * 6]
    assert found.features[0, :3].tolist() == [9, 1, -1]
    np.testing.assert_allclose(found.values[0, :3], [-0.8, 0.6, 0])


@pytest.mark.parametrize(
    ("name", "lines", "sentence"),
    [
        ("click_model", 49, "There are 49 examples, and 50 are needed"),
        ("extreme_classification", 20, "There are 19 examples, and 20 are needed"),
    ],
)
def test_too_few_examples_to_keep_some_from_training(name, lines, sentence, tmp_path):
    options = tiny.EXAMPLES[name].data(tmp_path)
    few = pathlib.Path(options[1]).read_text().splitlines()[:lines]
    pathlib.Path(options[1]).write_text("\n".join(few))
    main = importlib.import_module(f"examples.{name}").main
    assert sentence in refused(main, [*options, "--devices", "2"])


def test_images_that_are_none(tmp_path):
    digits_vgg = importlib.import_module("examples.digits_vgg")
    grey, labels = np.ones((5, 2, 2)), np.arange(5)
    cases = [
        (grey, labels[:4], "images of shape [5, 2, 2] and labels of shape [4]"),
        (grey[0], labels[:2], "images of shape [2, 2]"),
        (grey, labels / 2, "labels that are not whole numbers from 0"),
        (0 * grey, labels, "images that are all black"),
    ]
    for images, of, sentence in cases:
        np.savez(tmp_path / "x.npz", images=images, labels=of)
        assert sentence in refused(digits_vgg.read, str(tmp_path / "x.npz"))


def test_arrays_that_are_none(tmp_path):
    path = write(tmp_path, "no arrays")
    assert "is no file of NumPy's format .npz" in refused(files.arrays, path, "images")
    path = str(tmp_path / "arrays.npz")
    np.savez(path, pictures=np.zeros(3))
    sentence = refused(files.arrays, path, "images", "labels")
    assert "has no array 'images': it is to have images and labels, and has pictures" in (
        sentence
    )

"""The size "paper" has as many numbers as the papers count; the demo imports little."""

import subprocess
import sys

import jax
import pytest
from flax import nnx

from examples import (
    click_model,
    digits_vgg,
    extreme_classification,
    language_model,
    lm_model,
    transformer_tp,
    translation,
)


def counted(make):
    """How many numbers there are by parameter, without making any."""
    shapes = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(make(), nnx.Param)))
    paths = jax.tree_util.tree_leaves_with_path(shapes)
    return {jax.tree_util.keystr(path, simple=True): x.size for path, x in paths}


def tables_and_rest(sizes):
    """Millions of numbers in tables and in all else."""
    tables = sum(size for name, size in sizes.items() if "embedding" in name)
    return round(tables / 1e6), round((sum(sizes.values()) - tables) / 1e6)


@pytest.mark.parametrize(
    ("make", "millions"),
    [
        # Zen: the tables, and all else.
        (
            lambda rngs: click_model.DeepFM(39, *click_model.SIZES["paper"][:3], rngs),
            (214, 69),
        ),
        (
            lambda rngs: translation.Translator(*translation.SIZES["paper"][:3], rngs),
            (112, 31),
        ),
    ],
    ids=["DeepFM", "the translator"],
)
def test_models_have_the_tables_and_the_rest_of_those_of_zen(make, millions):
    assert tables_and_rest(counted(lambda: make(nnx.Rngs(0)))) == millions


def test_vgg_is_that_of_ok_topk():
    groups, repeated, _ = digits_vgg.SIZES["paper"]
    pixels = 8 * repeated, 8 * repeated
    sizes = counted(lambda: digits_vgg.VGG(groups, 3, pixels, 10, nnx.Rngs(0)))
    assert sum(sizes.values()) == 14_728_266


def test_the_layer_of_labels_is_that_of_dragonn():
    hidden, _, features, labels = extreme_classification.SIZES["paper"]
    make = lambda: extreme_classification.Classifier(features, hidden, labels, nnx.Rngs(0))
    assert round(counted(make)["labelskernel"] / 1e6, 2) == 126.72


def test_the_decoder_is_that_of_zen():
    words, width, blocks, heads, length, _ = transformer_tp.SIZES["paper"]
    make = lambda blocks: transformer_tp.Decoder(
        words, width, blocks, heads, length, nnx.Rngs(0)
    )
    one, two = (sum(counted(lambda n=n: make(n)).values()) for n in (1, 2))
    # Every block is like the second one; OPT-2.7B has 2.65 billion numbers.
    assert round((one + (blocks - 1) * (two - one)) / 1e9, 2) == 2.65


def test_the_language_model_is_that_of_zen():
    words, width, hidden = language_model.SIZES["paper"]
    small = lm_model.init(10, width, hidden=hidden)
    tables = 2 * words * width
    rest = sum(x.size for name, x in small.items() if name in ("lstm", "projection"))
    assert (round(tables / 1e6), round(rest / 1e6)) == (406, 19)


@pytest.mark.slow
def test_the_demo_imports_what_its_extra_has_and_no_more():
    code = (
        "import sys, examples.language_model\n"
        "found = {'flax', 'grain', 'orbax', 'sklearn', 'tensorboardX'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

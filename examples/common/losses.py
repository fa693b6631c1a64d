"""The sampled softmax, with which a step reads few rows of a table of output words."""

import jax
import jax.numpy as jnp
import numpy as np


def draw_words(rng: np.random.Generator, vocabulary: int, *shape: int) -> np.ndarray:
    """Draws negatives, int32, near to how often words come.

    Args:
        rng: The random numbers.
        vocabulary: The number of words, which are in the order of their frequency.
        shape: Of the result.
    """
    drawn = np.exp(rng.random(shape) * np.log(vocabulary + 1)) - 1
    return np.minimum(drawn, vocabulary - 1).astype(np.int32)


def sampled_softmax(
    hidden: jax.Array,
    table: jax.Array,
    bias: jax.Array,
    targets: jax.Array,
    negatives: jax.Array,
) -> jax.Array:
    """The loss of each target against the same negatives.

    Args:
        hidden: [sentences, length, width], the vectors that score words.
        table: [words, width], a row for each word.
        bias: [words].
        targets: [sentences, length], the right words.
        negatives: [drawn], words as `draw_words` draws them.
    """
    # One lookup of all words: each would be merged, and caught up, by itself.
    rows = table[jnp.concatenate([targets.reshape(-1), negatives])]
    of_targets = rows[: targets.size].reshape(*targets.shape, -1)
    right = jnp.einsum("wld,wld->wl", hidden, of_targets)
    right += _corrected(bias, targets)
    wrong = jnp.einsum("wld,nd->wln", hidden, rows[targets.size :])
    wrong += _corrected(bias, negatives)
    # A negative that happens to be the right word is none.
    wrong = jnp.where(targets[..., None] == negatives, -jnp.inf, wrong)
    scores = jnp.concatenate([right[..., None], wrong], axis=-1)
    return jax.nn.logsumexp(scores, axis=-1) - right


def _corrected(bias, words):
    """The bias of a word's score, less the log of how often it is drawn."""
    share = jnp.log1p(1 / (words + 1.0)) / np.log(len(bias) + 1)
    return bias[words] - jnp.log(share)

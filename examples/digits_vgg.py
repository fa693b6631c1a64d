"""Trains a VGG to read digits, and sends one gradient in fifty: Ok-Topk and SparDL.

    python -m examples.digits_vgg
    python -m examples.digits_vgg --data images.npz     # with arrays images and labels

No gradient of a convolution is zero, so both systems select the largest, and keep the rest
for later steps. Ranks select different entries; the systems differ in how they sum these.
The data are scikit-learn's handwritten digits, or images of your own: `images` is [images,
height, width] or [..., channels], `labels` whole numbers from 0.
"""

import functools
import hashlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import sparsejax
from examples.common import command, devices, feeding, files
from examples.common.session import Session


LEARNING_RATE, MOMENTUM = 0.02, 0.9
DENSITY = 0.02
WARM_UP = 20  # steps in which all is sent
# Channels of each convolution, a pool behind each group; how often a pixel is repeated,
# images a device. The larger is VGG-16 as in table 2 of Ok-Topk: 14,728,266 numbers.
SIZES = {
    "small": (((64, 128), (128, 128)), 1, 16),
    "paper": (((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3), 4, 16),
}


class VGG(nnx.Module):
    def __init__(self, groups, channels, pixels, classes, rngs):
        self.groups = nnx.List()
        for group in groups:
            layers = nnx.List()
            for out in group:
                layers.append(nnx.Conv(channels, out, (3, 3), rngs=rngs))
                # Of each image alone, so that devices have nothing to agree upon.
                layers.append(nnx.GroupNorm(out, num_groups=min(8, out), rngs=rngs))
                channels = out
            self.groups.append(layers)
            pixels = [size // 2 for size in pixels]
        self.out = nnx.Linear(channels * pixels[0] * pixels[1], classes, rngs=rngs)

    def __call__(self, x):
        for layers in self.groups:
            for conv, norm in zip(layers[::2], layers[1::2], strict=True):
                x = jax.nn.relu(norm(conv(x)))
            x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        return self.out(x.reshape(len(x), -1))


def loss_fn(model, params, batch):
    """The mean loss of one device's share of a batch."""
    logits = nnx.merge(model, params)(batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


# What waits is sent late, so the momentum is that of what waits, and SGD has none.
MEMORY = sparsejax.MomentumCorrection(MOMENTUM)
SYNCS = {
    "dense": lambda: (sparsejax.dense_sync(), optax.sgd(LEARNING_RATE, MOMENTUM)),
    "ok_topk": lambda: (
        sparsejax.warm_up(sparsejax.ok_topk_sync(DENSITY, memory=MEMORY), WARM_UP),
        optax.sgd(LEARNING_RATE),
    ),
    "spardl": lambda: (
        sparsejax.warm_up(sparsejax.spardl_sync(DENSITY, memory=MEMORY), WARM_UP),
        optax.sgd(LEARNING_RATE),
    ),
}


def main(argv: Sequence[str] | None = None) -> Session:
    """Runs the example; `argv` as on the command line. Returns the runs."""
    parser = command.parser("digits_vgg", __doc__, SYNCS, devices=4)
    parser.add_argument("--data", metavar="FILE", help="arrays of your own, .npz")
    options = command.parse(parser, argv)
    mesh = devices.mesh(options.devices)
    groups, repeated, size = SIZES[options.size]
    images, labels, versions = read(options.data)
    images = images.repeat(repeated, 1).repeat(repeated, 2)
    apart = np.arange(len(labels)) % 5 == 4
    kept = {"images": images[~apart], "labels": labels[~apart]}
    batches = feeding.shuffled(kept, mesh.size * size, options.seed)

    *pixels, channels = images.shape[1:]
    least = 2 ** len(groups)
    if min(pixels) < least:
        raise SystemExit(
            f"Images are of {pixels[0]} x {pixels[1]} pixels, and with {len(groups)} pools "
            f"they must be of {least} x {least} or more."
        )
    classes = int(labels.max()) + 1
    network = VGG(groups, channels, pixels, classes, nnx.Rngs(options.seed))
    model, params = nnx.split(network, nnx.Param)
    loss = functools.partial(loss_fn, model)
    read_digits = jax.jit(lambda params: nnx.merge(model, params)(images[apart]).argmax(-1))
    scores = lambda params: {
        "accuracy": float((np.asarray(read_digits(params)) == labels[apart]).mean())
    }

    sha256 = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    session = Session(options, mesh, {"sha256": sha256, "versions": versions})
    session.about(
        f"{len(images):,} images of {pixels[0]} x {pixels[1]} pixels, {classes} kinds",
        f"a VGG of {sum(map(len, groups))} convolutions",
    )
    for name in options.sync:
        sync, optimizer = SYNCS[name]()
        tx = optax.chain(sync, optimizer)
        trainer = sparsejax.data_parallel(loss, tx, mesh)
        start = nnx.to_pure_dict(params)
        session.train(name, trainer, start, batches, scores=scores)
    return session.finish()


def read(path):
    """Images [images, height, width, channels] from 0 to 1, labels, and their source."""
    if path:
        images, labels = files.arrays(path, "images", "labels")
        check(path, images, labels)
        versions = {"images": Path(path).name}
    else:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 8, 8)
        versions = {"scikit-learn": metadata.version("scikit-learn")}
    images = images.reshape(*images.shape[:3], -1)
    return (images / images.max()).astype(np.float32), labels.astype(np.int32), versions


def check(path, images, labels):
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1] or len(images) < 5:
        raise SystemExit(
            f"{path} has images of shape {list(images.shape)} and labels of shape "
            f"{list(labels.shape)}; they are to be [images, height, width] or [images, "
            "height, width, channels], and [images], for five images or more."
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise SystemExit(f"{path} has labels that are not whole numbers from 0.")
    if not np.isfinite(images).all() or images.max() <= 0:
        raise SystemExit(f"{path} has images that are all black, or not finite.")


if __name__ == "__main__":
    main()

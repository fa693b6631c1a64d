"""Runs README's code with the sparsejax that is installed: `python wheel.py README.md`."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import optax

import sparsejax


jax.config.update("jax_num_cpu_devices", 4)
here = pathlib.Path(sparsejax.__file__)
assert "site-packages" in here.parts, f"not the wheel: {here}"
assert (here.parent / "py.typed").exists(), "types are not in the wheel"
assert sparsejax.__version__ != "0.0.0", "no metadata in the wheel"


def loss_fn(params, batch):
    """What README takes for granted."""
    return optax.squared_error(batch["x"] @ params["w"], batch["y"]).mean()


batches = [{"x": jnp.full((8, 3), i), "y": jnp.ones((8, 2))} for i in (1.0, 2.0)]
names = {"jax": jax, "optax": optax, "sparsejax": sparsejax, "loss_fn": loss_fn}
names |= {"batches": batches, "params": {"w": jnp.ones((3, 2))}}
blocks = re.findall(
    r"^```python\n(.*?)^```$", pathlib.Path(sys.argv[1]).read_text(), re.M | re.S
)
assert blocks, "README has no code"
for block in blocks:
    exec(compile(block, sys.argv[1], "exec"), names)
assert jnp.isfinite(names["loss"])
python = ".".join(map(str, sys.version_info[:2]))
print(f"The wheel works on Python {python} with JAX {jax.__version__}.")

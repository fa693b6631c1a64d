"""Systems that choose what they send, by name, and gradients to compare them on."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

import sparsejax
from benchmarks.network.jax_side import AXIS, JaxSide
from benchmarks.papers.formulas import cost_tables
from benchmarks.papers.formulas.cost_model import Cost


STEPS = 3  # gradients, in turn


def transformations(density: float, ranks: int) -> dict:
    """The systems by name; those in the papers' format, 8 bytes an entry, have a star."""
    plain = {"code": "coo32"}
    return {
        "psum": None,
        "topk_a": sparsejax.transforms.topk_a_sync(density, reduce="sum"),
        "topk_a*": sparsejax.transforms.topk_a_sync(density, reduce="sum", **plain),
        "gaussian_k": sparsejax.transforms.gaussian_k_sync(density, reduce="sum"),
        "topk_dsa": sparsejax.transforms.topk_dsa_sync(density, reduce="sum"),
        "topk_dsa*": sparsejax.transforms.topk_dsa_sync(density, reduce="sum", **plain),
        "gtopk": sparsejax.transforms.gtopk_sync(density, reduce="sum"),
        "gtopk*": sparsejax.transforms.gtopk_sync(density, reduce="sum", **plain),
        "ok_topk": sparsejax.ok_topk_sync(density, reduce="sum"),
        "ok_topk*": sparsejax.ok_topk_sync(density, reduce="sum", **plain),
        "ok_topk rotated": sparsejax.ok_topk_sync(density, reduce="sum", split="rotated"),
        "spardl": sparsejax.spardl_sync(density, reduce="sum"),
        "spardl*": sparsejax.spardl_sync(density, reduce="sum", **plain),
        **{
            f"spardl {teams} {between}": sparsejax.spardl_sync(
                density, reduce="sum", teams=teams, between=between
            )
            for teams, between in ((2, "swaps"), (4, "swaps"), (7, "gather"))
            if ranks % teams == 0
        },
    }


def paper(name: str, k: int, size: int, ranks: int) -> Cost:
    """The cost by the papers' tables, for 8 bytes an entry; the worst of a range."""
    system, *rest = name.rstrip("*").split()
    teams, between = (int(rest[0]), rest[1]) if len(rest) == 2 else (1, "")
    return {
        "psum": lambda: cost_tables.dense(size, ranks),
        "topk_a": lambda: cost_tables.topk_a(k, ranks),
        "gaussian_k": lambda: cost_tables.gaussian_k(k, ranks),
        "topk_dsa": lambda: cost_tables.topk_dsa(k, size, ranks)[1],
        "gtopk": lambda: cost_tables.g_topk(k, ranks),
        "ok_topk": lambda: cost_tables.ok_topk(k, ranks)[1],
        "spardl": lambda: (
            cost_tables.spar_dl_b_sag(k, ranks, teams)[1]
            if between == "gather"
            else cost_tables.spar_dl_r_sag(k, ranks, teams)
        ),
    }[system]()


def gradients(size: int, rank: int) -> list[np.ndarray]:
    """A rank's gradients of one step after another, over and over.

    Long tails, half of the variance shared by the ranks and a tenth by the steps, and no
    part like another.
    """
    rng, shared = np.random.default_rng((7, rank)), np.random.default_rng(7)
    always = 0.5 * shared.standard_t(4, size)
    scale = np.repeat(np.exp(shared.standard_normal(64)), -(-size // 64))[:size]
    drawn = []
    for _ in range(STEPS):
        x = always + rng.standard_t(4, size) + shared.standard_t(4, size)
        drawn.append((x * scale).astype(np.float32))
    return drawn


def side(name: str, tx, size: int, mesh: Mesh) -> JaxSide:
    """A system on a gradient of one size, as an optax transformation."""
    if tx is None:
        return JaxSide(name, (size,), mesh, lambda x, s: (lax.psum(x, AXIS), s), ())

    def step(x, state):
        total, state = tx.update({"w": x}, state)
        return total["w"], state

    state = sparsejax.init(tx, {"w": jnp.zeros(size, jnp.float32)}, mesh)
    return JaxSide(name, (size,), mesh, step, state)

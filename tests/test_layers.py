"""Imports point down, only one file talks to other ranks, and no file is too long.

Read with `ast`, so nothing is executed.
"""

import ast
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parent.parent

# From the bottom up. A module may import those of lower lines, and none of its own line.
# A new module gets a place here.
LAYERS = [
    {
        "pallas_kernels.errors",
        "pallas_kernels.pallas",
        "pallas_kernels.rank_select",
        "pallas_kernels.triton",
        "pallas_kernels.triton.words",
        "pallas_kernels.types",
    },
    {"pallas_kernels.pallas.launch"},
    {"pallas_kernels.hashing", "pallas_kernels.backends", "pallas_kernels.checks"},
    {"pallas_kernels.triton.launch"},
    {"pallas_kernels.striping"},
    {"pallas_kernels.reference"},
    {
        "pallas_kernels.pallas.bitmap",
        "pallas_kernels.pallas.partition",
        "pallas_kernels.pallas.threshold_hash",
        "pallas_kernels.triton.bitmap",
        "pallas_kernels.triton.coo_add",
        "pallas_kernels.triton.partition",
        "pallas_kernels.triton.threshold_hash",
    },
    {"pallas_kernels.triton.partition_dense"},
    {
        "pallas_kernels.bitmap",
        "pallas_kernels.compact",
        "pallas_kernels.coo_add",
        "pallas_kernels.merge_rows",
        "pallas_kernels.partition",
        "pallas_kernels.partition_by_bits",
        "pallas_kernels.partition_dense",
        "pallas_kernels.threshold_hash",
    },
    {"pallas_kernels"},
    {"sparsejax.errors", "sparsejax._compat", "sparsejax.signatures"},
    {"sparsejax.checks", "sparsejax.cost_model"},
    {"sparsejax.cost_tables"},
    {"sparsejax.bits", "sparsejax.axes"},
    {"sparsejax.index_codes", "sparsejax.ownership", "sparsejax.sparse_tensor"},
    {"sparsejax.wire", "sparsejax.thresholds", "sparsejax.analysis"},
    {"sparsejax.gathers", "sparsejax.design_space", "sparsejax.magnitudes"},
    {"sparsejax.sparsifiers.base"},
    {"sparsejax.sparsifiers.dgc", "sparsejax.sparsifiers.top_k"},
    {
        "sparsejax.sparsifiers.dragonn",
        "sparsejax.sparsifiers.gaussian_k",
        "sparsejax.sparsifiers.ms_top_k",
        "sparsejax.sparsifiers.qsgd",
        "sparsejax.sparsifiers.random_k",
        "sparsejax.sparsifiers.reuse_threshold",
        "sparsejax.sparsifiers.sign",
        "sparsejax.sparsifiers.threshold",
    },
    {"sparsejax.sparsifiers"},
    {"sparsejax.ladder"},
    {"sparsejax.exchange", "sparsejax.forecast"},
    {"sparsejax.entries"},
    {"sparsejax.schemes.base", "sparsejax.schemes.growth"},
    {
        "sparsejax.schemes.doubling",
        "sparsejax.schemes.regions",
        "sparsejax.schemes.selecting",
    },
    {"sparsejax.schemes.region_gather", "sparsejax.schemes.swapping"},
    {"sparsejax.schemes.owners"},
    {"sparsejax.schemes.owners_forecast"},
    {
        "sparsejax.schemes.ag_sparse",
        "sparsejax.schemes.all_reduce",
        "sparsejax.schemes.balanced_parallelism",
        "sparsejax.schemes.g_topk",
        "sparsejax.schemes.hierarchical_centralization",
        "sparsejax.schemes.ok_topk",
        "sparsejax.schemes.omni_reduce",
        "sparsejax.schemes.spar_dl",
    },
    {
        "sparsejax.schemes.lossy_strawman",
        "sparsejax.schemes.sparcml",
        "sparsejax.schemes.sparse_ps",
        "sparsejax.schemes.zen",
    },
    {"sparsejax.schemes.two_level"},
    {"sparsejax.schemes"},
    {"sparsejax.tensor_selection"},
    {"sparsejax.leaves", "sparsejax.state", "sparsejax.plan", "sparsejax.memory"},
    {"sparsejax.sparsify", "sparsejax.specs", "sparsejax.state_checks"},
    {"sparsejax.sparsifying"},
    {"sparsejax.planner", "sparsejax.synchronizer"},
    {"sparsejax.densities"},
    {"sparsejax.transforms"},
    {"sparsejax.choosing", "sparsejax.resizing"},
    {"sparsejax.team_times"},
    {"sparsejax.reduce", "sparsejax.data_parallel", "sparsejax.explanation"},
    {"sparsejax"},
    {"sparsejax.__main__"},
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}

# What waits for other ranks or sends to them, and what only changes a type.
COLLECTIVES = {
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "ragged_all_to_all",
}
CASTS = {"pcast", "pvary"}
MAY_USE = {
    "sparsejax.wire": COLLECTIVES,
    "pallas_kernels.types": CASTS,
}


def own_modules():
    """The module names of the library, with their files."""
    found = {}
    for package in ("sparsejax", "pallas_kernels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = own_modules()
every_module = pytest.mark.parametrize("module", MODULES)


def imports(source, modules):
    """Which of the modules a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            # What is no module is a name that the package itself holds.
            names = [name if name in modules else node.module for name in inside]
        found.update(name for name in names if name in modules)
    return found


def lax_names(source, wanted):
    """Which of these functions of `jax.lax` a file names."""
    tree = ast.parse(source)
    lax = {"jax.lax"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            lax |= {alias.asname for alias in node.names if alias.name == "jax.lax"}
        elif isinstance(node, ast.ImportFrom) and node.module == "jax":
            lax |= {a.asname or a.name for a in node.names if a.name == "lax"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax.lax"):
            found |= {alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in lax:
            found.add(node.attr)
    return found & wanted


def misplaced(module, targets, level):
    """What is wrong with what a module imports, as sentences."""
    missing = sorted({module, *targets} - set(level))
    if missing:
        todo = "has no place: add it to LAYERS in test_layers.py"
        return [f"{name} {todo}" for name in missing]
    return [
        f"{module} (layer {level[module]}) imports {target} (layer {level[target]})"
        for target in sorted(targets)
        if level[target] >= level[module]
    ]


@every_module
def test_imports_point_down(module):
    found = misplaced(module, imports(MODULES[module].read_text(), MODULES), LEVEL)
    assert not found, "; ".join(found)


@every_module
def test_only_wire_calls_collectives_and_only_types_casts(module):
    found = lax_names(MODULES[module].read_text(), COLLECTIVES | CASTS)
    extra = found - MAY_USE.get(module, set())
    assert not extra, f"{module} uses lax.{', lax.'.join(sorted(extra))}"


@every_module
def test_every_module_says_what_it_is(module):
    assert ast.get_docstring(ast.parse(MODULES[module].read_text()))


@every_module
def test_no_file_is_over_400_lines(module):
    assert len(MODULES[module].read_text().splitlines()) <= 400


def test_the_table_names_each_module_once_and_only_modules_that_exist():
    listed = [module for modules in LAYERS for module in modules]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(MODULES)


def test_the_checks_see_what_they_are_to_refuse():
    level = {"a": 0, "b.c": 1, "b.d": 1, "b": 2}
    source = "from b import c, name\nimport jax\ndef f():\n    import b.d\n"
    assert imports(source, level) == {"b", "b.c", "b.d"}
    assert misplaced("b", {"a", "b.c"}, level) == []
    assert misplaced("b.c", {"b.d"}, level) == ["b.c (layer 1) imports b.d (layer 1)"]
    assert misplaced("a", {"b"}, level) == ["a (layer 0) imports b (layer 2)"]
    assert "add it to LAYERS" in misplaced("new", {"a"}, level)[0]
    for call in (
        "from jax import lax\nlax.psum(x, 'data')",
        "from jax import lax as l\nl.psum(x, 'data')",
        "import jax\njax.lax.psum(x, 'data')",
        "import jax.lax as l\nl.psum(x, 'data')",
        "from jax.lax import psum",
    ):
        assert lax_names(call, COLLECTIVES) == {"psum"}
    assert lax_names("from jax import lax\nlax.axis_index('data')", COLLECTIVES) == set()

"""Imports point down, only one file talks to other ranks, and no file is too long.

Read with `ast`, so nothing is executed.
"""

import ast
import graphlib
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]

# From the bottom up: a module imports modules of its own folder and of lower floors.
FLOORS = [
    {"pallas_kernels"},
    {"sparsejax.errors", "sparsejax.branches"},
    {"sparsejax.arguments"},
    {"sparsejax.axes", "sparsejax.jobs"},
    {"sparsejax.tracing", "sparsejax.units"},
    {"sparsejax.wire"},
    {"sparsejax.sparsifiers"},
    {"sparsejax.schemes"},
    {"sparsejax.state"},
    {"sparsejax.transforms"},
    {"sparsejax.chunked"},
    {"sparsejax.rounds"},
    {"sparsejax.rows", "sparsejax.placement", "sparsejax.checkpoints"},
    {"sparsejax.monitor"},
    {"sparsejax.embrace", "sparsejax.advise"},
    {"sparsejax.training"},
    {"sparsejax"},
    {"sparsejax.__main__"},
]

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
MAY_USE = {"sparsejax.wire.collectives": COLLECTIVES, "pallas_kernels.types": CASTS}


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


def room(module):
    """The folder of the first floor that a module belongs to, and the floor's number."""
    name = ".".join(module.split(".")[: 1 if module.startswith("pallas") else 2])
    return name, next(i for i, floor in enumerate(FLOORS) if name in floor)


@every_module
def test_imports_point_down(module):
    name, floor = room(module)
    for target in imports(MODULES[module].read_text(), MODULES):
        other, below = room(target)
        assert other == name or below < floor, f"{module} imports {target}"


OF_JAX = {"jax", "numpy"}
# The one file that launches kernels of Triton, by the version of JAX; what it alone knows.
LAUNCHES = "pallas_kernels.triton.launch"
LAUNCHERS = ("jax_triton", "thunky")


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("pallas_kernels")])
def test_kernels_depend_on_jax_alone(module):
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    others = found - sys.stdlib_module_names - {"pallas_kernels"} - OF_JAX
    if module.startswith("pallas_kernels.triton."):
        others -= {"triton"}
    assert not others - ({"jax_triton"} if module == LAUNCHES else set())


def words(source, wanted):
    """Which of these words a file has, in code or in its text."""
    return {word for word in wanted if word in source}


@every_module
def test_one_file_knows_how_kernels_of_triton_are_launched(module):
    known = LAUNCHERS if module == LAUNCHES else ()
    assert words(MODULES[module].read_text(), LAUNCHERS) == {*known}


def test_no_module_imports_itself_by_way_of_others():
    graph = {m: imports(path.read_text(), MODULES) for m, path in MODULES.items()}
    list(graphlib.TopologicalSorter(graph).static_order())


# What the top folder has is listed above, floor by floor.
FOLDERS = sorted({path.parent for path in MODULES.values()} - {ROOT / "sparsejax"})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_folder_has_at_most_12_entries(folder):
    entries = {p.name for p in folder.iterdir() if p.suffix == ".py" or p.is_dir()}
    entries -= {"__init__.py", "__main__.py", "__pycache__"}
    where = "put what is new into one of its folders, or make one"
    assert len(entries) <= 12, f"{folder.name} has {len(entries)} entries: {where}"


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


def test_the_checks_see_what_they_are_to_refuse():
    modules = {"a", "b", "b.c", "b.d"}
    source = "from b import c, name\nimport jax\ndef f():\n    import b.d\n"
    assert imports(source, modules) == {"b", "b.c", "b.d"}
    assert room("sparsejax.wire.ladder") == ("sparsejax.wire", 5)
    assert room("pallas_kernels.triton.launch") == ("pallas_kernels", 0)
    for call in (
        "from jax import lax\nlax.psum(x, 'data')",
        "from jax import lax as l\nl.psum(x, 'data')",
        "import jax\njax.lax.psum(x, 'data')",
        "import jax.lax as l\nl.psum(x, 'data')",
        "from jax.lax import psum",
    ):
        assert lax_names(call, COLLECTIVES) == {"psum"}
    assert lax_names("from jax import lax\nlax.axis_index('data')", COLLECTIVES) == set()
    assert words("from jax.experimental import thunky as t", LAUNCHERS) == {"thunky"}
    assert words('__import__("jax_triton")', LAUNCHERS) == {"jax_triton"}

"""What pages name is there: extras, targets of make, modules, commands; tables name all."""

import importlib.util
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import tomllib

import numpy as np
import pytest

import pallas_kernels
import sparsejax
from benchmarks.device import graphs
from sparsejax import __main__ as command, schemes, sparsifiers
from sparsejax.schemes.base import LossyScheme
from sparsejax.sparsifiers import base
from sparsejax.wire import index_codes
from sparsejax.wire.value_codes.codes import CODES
from tests.test_readme import PAGES as ALL


ROOT = pathlib.Path(__file__).parent.parent
# These repeat the commands of records, as they were given then.
OF_RECORDS = {"docs/performance.md", "docs/performance_tables.md"}
PAGES = {name: text for name, text in ALL.items() if name not in OF_RECORDS}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def everywhere(pattern):
    """All that a pattern finds on all pages."""
    return {found for text in PAGES.values() for found in re.findall(pattern, text)}


def named_in(page, column):
    """The names in the first column of a table, by what stands above it."""
    table = re.search(rf"^\| {re.escape(column)} \|.*(?:\n\|.*)*", PAGES[page], re.M)
    assert table, column
    cells = [row.split(" | ")[0] for row in table[0].splitlines()[2:]]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


# --- To install, and to make.


def test_extras_are_those_of_the_project():
    named = everywhere(r"(?:\.|sparsejax)\[(\w[\w,]*)\]")
    assert {"checkpoint", "cuda12", "cuda13", "triton"} <= named
    assert {extra for names in named for extra in names.split(",")} <= {*EXTRAS}


OURS = {"jax", "jaxlib", "optax"}


def asked_of(requirement):
    """The package that a requirement names, and what it says of versions and platforms."""
    name, rest = re.match(r"([\w.-]+)(.*)", requirement).groups()
    return name.lower(), rest


@pytest.mark.parametrize("extra", EXTRAS)
def test_no_extra_takes_away_the_jax_that_is_there(extra):
    """Below an upper bound pip would put an older one, beside a plugin that stays."""
    asked = [asked_of(one) for one in EXTRAS[extra]]
    assert not [one for one in asked if one[0] in OURS and re.search(r"<|==|~=", one[1])]


def test_triton_comes_with_what_launches_it_on_every_jax():
    asked = dict(map(asked_of, EXTRAS["triton"]))
    assert asked.keys() == {"triton", "jax-triton"}
    # Nor do these ask for a JAX that is not the oldest: 0.4 does.
    assert asked["jax-triton"].startswith(">=0.3.1,<0.4;")
    assert asked["triton"].startswith(">=3.6,<3.7;")


def test_pages_say_which_python_is_needed():
    assert everywhere(r"Python (3\.\d+) or newer") == {"3.11"}
    assert PROJECT["requires-python"] == ">=3.11"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_lists_its_targets_and_pages_name_some_of_them():
    # Within `make test` it would say where it is.
    listed = subprocess.run(
        ["make", "--no-print-directory"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    targets = {line.split()[0] for line in listed.stdout.splitlines()}
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert targets == {*phony.split()}
    named = everywhere(r"`make ([a-z-]+)")
    assert {"demo", "docs", "aot"} <= named <= targets


# --- To run.


def test_modules_that_pages_run_are_there():
    named = everywhere(r"python -m ((?:benchmarks|examples)[\w.]*)")
    assert len(named) > 3
    for module in named:
        assert importlib.util.find_spec(module), module


# One line of a shell, which may go on behind a backslash.
LINE = re.compile(r"^(?:\$ )?(python -m sparsejax (?:[^\n\\]|\\\n)*)$", re.M)
LINES = [
    (page, line.replace("\\\n", " "))
    for page, text in PAGES.items()
    for line in LINE.findall(text)
    if "--leaf" in line
]


@pytest.mark.parametrize(("page", "line"), LINES)
def test_a_command_of_a_page_runs(page, line, capsys):
    assert {name for name, _ in LINES} == {"docs/which.md", "docs/doctor.md"}
    assert command.main(shlex.split(line)[3:]) == 0
    assert "keep sparsejax.zen_sync()" in capsys.readouterr().out


def test_flags_of_cuda_graphs_are_those_that_were_counted():
    (flags,) = everywhere(r"xla_gpu_enable_command_buffer=\+(\S+)\"")
    assert {*flags.split(",+")} == {*graphs.ALL} - {*graphs.USUAL}


def test_figures_from_a_gpu_are_those_that_pages_name():
    assert "none of a network of GPUs" in PAGES["README.md"]
    records = [*(ROOT / "benchmarks" / "results").glob("*.jsonl")]
    assert len(records) > 30
    heads = {path: json.loads(path.read_text().partition("\n")[0]) for path in records}
    on_gpus = {path.name for path, head in heads.items() if head.get("backend") != "cpu"}
    assert on_gpus == {
        "gpu-jax0.11.2.jsonl",
        "gpu-jax0.12.0.1.jsonl",
        "hardware-jax0.11.2.jsonl",
        "kernels-figure14-gpu-jax0.11.2.jsonl",
    }
    for path, head in heads.items():
        assert (path.name in on_gpus) == ("device" in head), path.name


# --- Tables name all there are, and nothing else.


def public(module, kind, but=()):
    """The names of the public classes of a kind."""
    found = [x for x in vars(module).values() if isinstance(x, type)]
    return {x.__name__ for x in found if issubclass(x, kind)} - {kind.__name__, *but}


def test_the_table_of_exact_schemes():
    exact = public(schemes, schemes.Scheme) - public(schemes, LossyScheme)
    assert named_in("docs/concepts/schemes.md", "scheme in `sparsejax.schemes`") == exact
    number = "zero one two three four five six seven eight nine ten eleven twelve".split()
    said = f"any of {number[len(exact)]} schemes by `sync`"
    assert said in PAGES["README.md"], f"README.md and promises.toml have to say {said!r}"


def test_the_table_of_sparsifiers():
    bases = {"Selector", "ByMagnitude", "Rounding"}
    there, page = (
        public(sparsifiers, base.Sparsifier, bases),
        "docs/concepts/sparsifiers.md",
    )
    missing = named_in(page, "sparsifier") ^ there
    assert not missing, f"the table of {page} must have a row for each sparsifier"


def test_the_table_of_systems_that_select():
    named = named_in("docs/concepts/schemes.md", "transformation")
    exact = {"sync", "zen_sync", "dense_sync", "embrace_sync"}
    there = {*dir(sparsejax), *dir(sparsejax.transforms)}
    there = {name for name in there if name.endswith("_sync")} - exact
    assert {name.removeprefix("transforms.") for name in named} == there


def test_the_table_of_recipes():
    files = (ROOT / "examples" / "recipes").glob("[!_]*.py")
    assert named_in("docs/states.md", "recipe") == {path.name for path in files}


def test_the_table_of_index_codes():
    assert named_in("docs/how.md", "code") == {*index_codes.CODES}


def test_value_codes_are_listed_where_they_are_taken():
    page = "docs/concepts/sparsifiers.md"
    functions = sparsejax.sparsify, sparsejax.chunked_sync
    texts = {function.__name__: function.__doc__ for function in functions}
    for name, text in (texts | {page: PAGES[page]}).items():
        missing = [code for code in CODES if f'"{code}"' not in text]
        assert not missing, f"{name} does not list the value codes {missing}"


def test_the_table_of_what_the_doctor_looks_at():
    """Of one process all but the job itself."""
    params = {"embedding": np.zeros((9000, 8), np.float32)}
    report = sparsejax.doctor(params=params, network=sparsejax.Network(1, 20))
    found = {finding.about for finding in report.findings}
    assert named_in("docs/doctor.md", "about") == found | {"job"}


def test_kernels_that_a_page_names_are_public():
    text = " ".join(PAGES["docs/kernels.md"].split())
    text = text.partition("can be used without sparsejax: ")[2]
    named = re.findall(r"`(\w+)`", text.partition("`pallas_kernels/reference/`")[0])
    assert {"compact", "partition", "unpack_message"} <= {*named}
    assert [name for name in named if not hasattr(pallas_kernels, name)] == []

"""What README and the pages of docs/ show runs: their code, with small names given."""

import importlib
import json
import pathlib
import re
import sys
import textwrap

import jax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from tests import helpers
from tests.helpers import snippets


ROOT = pathlib.Path(__file__).parent.parent
BLOCK = re.compile(r"^(<!-- test: .*? -->\n)?```python\n(.*?)^```$", re.M | re.S)
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "_build" not in path.parts
}
WITH_CODE = [name for name, text in PAGES.items() if BLOCK.search(text)]

# Pages whose parameters are not small.
OF_LARGE = (
    *("which", "dense", "systems/ok_topk", "systems/spardl"),
    *("concepts/schemes", "concepts/sparsifiers", "concepts/metrics"),
)
OTHERS = {f"docs/{page}.md": snippets.large for page in OF_LARGE} | {
    f"docs/{page}.md": snippets.table_and_head for page in ("rows", "concepts/rows")
}
# What a note in front of a block says of it, by what the notes say.
NOTED = {
    "names of two axes": lambda names, block: (names | snippets.two_axes(), block),
    "inside jit": lambda names, block: (names | snippets.inside_jit(), _on_mesh(block)),
    "a checkpoint": lambda names, block: (names, _on_mesh(block, GONE_ON)),
    "a bias": lambda names, block: (
        names | snippets.inside_jit() | {"params": {"bias": jax.numpy.ones(4)}},
        _where_mesh_is_set(block),
    ),
    "on replicas of shards": lambda names, block: (
        names | snippets.sharded_over_fsdp(),
        _where_mesh_is_set(block),
    ),
    "on auto axes": lambda names, block: (
        names | snippets.on_auto_axes(),
        _where_mesh_is_set(f"{block}step(params, opt_state, batch)\n"),
    ),
    "over the ranks": lambda names, block: (
        names | snippets.over_the_ranks(),
        _on_mesh(block, ""),
    ),
    "striped": lambda names, block: (names | snippets.striped(), block),
    "a table under jit": lambda names, block: (
        names | snippets.table_under_jit(),
        _where_mesh_is_set(f"{block}step(params, opt_state, ids)\n"),
    ),
    "where a mesh is set": lambda names, block: (names, _where_mesh_is_set(block)),
    # What it defines is not for the blocks after it.
    "by itself": lambda names, block: (names, _called(block)),
    # It shows an error, and must raise it: no class above or below it.
    **{
        f"raises {name}": lambda names, block, name=name: (names, _raising(name, block))
        for name in snippets.ERRORS
    },
    # What there would have to be a GPU for is run as a test runs it.
    "interpreted": lambda names, block: (
        names,
        block.replace('use_kernels("pallas")', 'use_kernels("pallas", interpret=True)'),
    ),
}


GONE_ON = """
batch = jax.device_put(jax.device_get(batch), P(("replica", "fsdp")))
step(restored["params"], restored["opt_state"], batch)
"""


def _on_mesh(block, then="step(params, opt_state, batch)\n"):
    """A block that sets the mesh, and what is done after it."""
    mesh, block = block.split("jax.set_mesh(mesh)\n")
    return mesh + _where_mesh_is_set(block + then)


def _where_mesh_is_set(block):
    return f"with jax.set_mesh(mesh):\n{textwrap.indent(block, '    ')}"


def _called(block):
    return f"def block():\n{textwrap.indent(block, '    ')}block()\n"


def _raising(name, block):
    return (
        f"import pytest\n\nwith pytest.raises(sparsejax.errors.{name}) as raised:\n"
        f"{textwrap.indent(block, '    ')}"
        f"assert raised.type is sparsejax.errors.{name}\n"
    )


def run(page, note, block, names):
    """Runs a block of a page, as the note in front of it says.

    Args:
        page: Its name, for messages.
        note: The note; empty if there is none.
        block: The code.
        names: What the code finds, and where it leaves what it defines.

    Returns:
        The names for the block that follows.
    """
    if note:
        names, block = NOTED[note[len("<!-- test: ") : -len(" -->\n")]](names, block)
    try:
        exec(compile(block, f"a block of {page}", "exec"), names)
    except Exception as error:
        error.add_note(f"In this block of {page}:\n{block}")
        raise
    return names


# They train, several times, and what they show is tested by default elsewhere.
LONG = {"docs/inside_jit.md", "docs/local_steps.md", "docs/systems/embrace.md"}
LONG |= {"docs/loss_in_jit.md", "docs/rows_in_jit.md", "docs/which.md"}
LONG |= {"docs/kernels.md", "docs/rows.md", "docs/systems/local_steps.md"}
LONG |= {f"docs/concepts/{name}.md" for name in ("determinism", "metrics", "rows")}
# Each of its blocks is run by itself, by `test_errors_page.py`.
BY_BLOCK = {"docs/errors.md"}


@pytest.mark.parametrize(
    "page", [*sorted({*WITH_CODE} - LONG - BY_BLOCK), *helpers.slow(*sorted(LONG))]
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one saves a plan
    names = snippets.given() | OTHERS.get(page, dict)()
    for note, block in BLOCK.findall(PAGES[page]):
        names = run(page, note, block, names)


def test_pages_with_code_are_found():
    assert {"README.md", "docs/start.md", *LONG} <= {*WITH_CODE}
    assert len(PAGES["README.md"].splitlines()) <= 110


def changed_script(page, number=0):
    """What a diff of a page makes of a script."""
    diffs = re.findall(r"^```diff\n(.*?)^```$", PAGES[page], re.M | re.S)
    lines = diffs[number].splitlines()
    names = snippets.given()
    changed = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    exec(changed, names)
    return names


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/start.md"])
def test_the_change_to_a_script_under_jit(page):
    names = changed_script(page)
    params, tx = names["params"], names["tx"]
    with jax.set_mesh(names["mesh"]):
        stepped = names["train_step"](params, tx.init(params), names["batch"])
    assert jax.tree.structure(stepped[0]) == jax.tree.structure(params)
    assert float(sparsejax.metrics(stepped[1])["sync/exchanges"]) == 1


def test_the_change_to_a_script_inside_shard_map():
    names = changed_script("docs/start.md", 1)
    params, tx = names["params"], names["tx"]
    step = helpers.shard_map(
        names["train_step"],
        mesh=names["mesh"],
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
    )
    jax.eval_shape(step, params, tx.init(params), names["batch"])


NAME = re.compile(r"`(sparsejax\.[\w.]+|(?:[a-z_]+\.)*[a-z_]+_sync)\b[^`]*`")


@pytest.mark.parametrize("page", sorted(PAGES))
def test_names_on_a_page_are_there(page):
    text = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.M | re.S)
    for name in NAME.findall(text):
        path = ["sparsejax", *name.removeprefix("sparsejax.").split(".")]
        found = sparsejax
        for at, part in enumerate(path[1:], 2):
            if not hasattr(found, part):  # a module that is imported where it is needed
                importlib.import_module(".".join(path[:at]))
            found = getattr(found, part)


LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_page_links_to_what_is_there(page):
    folder = (ROOT / page).parent
    for link in LINK.findall(PAGES[page]):
        path, _, heading = link.partition("#")
        if "://" in link or not path:
            continue
        assert (folder / path).exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", (folder / path).read_text(), re.M)
            anchors = [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]
            assert heading in anchors, (link, anchors)


@pytest.fixture
def scripts(monkeypatch):
    """Imports a script of docs/, which is no package."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield importlib.import_module
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(f"{ROOT / 'docs'}/"):
            del sys.modules[name]


OF_RECORDS = {
    "docs/performance.md": "performance",
    "docs/performance_tables.md": "tables",
    "docs/faults.md": "faults",
}


def test_figures_of_pages_are_made_from_results(scripts):
    """`python docs/performance.py` writes what is there."""
    for page, script in OF_RECORDS.items():
        assert PAGES[page] == scripts(script).page(), page
    gains = scripts("gains")
    for path, way in gains.PAGES.items():
        text = PAGES[str(path.relative_to(ROOT))]
        assert text == gains.written(path)
        assert gains.chart(*way) in text


HEAD = {"jax": "0.10.2", "cores": 2, "processor": "P", "date": "2026-01-02"}
JOB = {"scheme": "zen", "fault": "cut", "hosts": 4, "seed": 0, "silence": 3.0, "wrong": ""}
BROKEN = {
    "fuzz": [
        {"law": "rows", "cases": 70, "failures": 2, "ways": {"one": 3}},
        {"law": "all", "cases": 70, "failures": 3, "programs": 9, "missed": ["rows: two"]},
    ],
    "faults": [
        JOB | {"ended": 4.25, "kept": 3, "lost": 2e-7},
        JOB | {"seed": 1, "ended": 40.5, "wrong": "host 2 hung\nwith a `bar`"},
        JOB | {"scheme": "new", "ended": 1.0, "kept": 3, "lost": 3e-7, "aborted": [1, 2]},
        JOB | {"scheme": "new", "fault": "pause", "lost": 1e-7},
    ],
    "long-run": [{"scheme": "dgc", "hosts": 4, "steps": 700, "wrong": "a process failed"}],
}


@pytest.fixture
def broken(scripts, tmp_path, monkeypatch):
    """The script of faults.md, with records in which much went wrong beside those there."""
    for path in (ROOT / "benchmarks" / "results").iterdir():
        if path.name.removesuffix("-jax0.10.2.jsonl") not in BROKEN:
            (tmp_path / path.name).symlink_to(path)
    for name, rows in BROKEN.items():
        lines = map(json.dumps, (HEAD | {"command": f"python {name}"}, *rows))
        (tmp_path / f"{name}-jax0.10.2.jsonl").write_text("\n".join(lines))
    made = scripts("faults")
    monkeypatch.setattr(scripts("recorded"), "RESULTS", tmp_path)
    return made


def test_what_was_not_as_promised_is_seen(broken):
    page = broken.page()
    lines = [line.removesuffix(" |").split(" | ") for line in page.splitlines()]
    cells = {line[0]: line[1:5] for line in lines}
    assert cells["| randomized cases, checked against the invariants"] == [
        *("70 cases of 1 invariants, 9 programs", "**67 of 70**"),
        *("1 code paths covered; of the required ones, **1 missing**", ""),
    ]
    assert cells["| one host is cut off from the network"] == [
        *("3 jobs of 4 hosts, 2 systems, 2 seeds", "**2 of 3**"),
        # 5 s, and 3 s of silence.
        "all hosts ended in **40.5 s** at most, 8 s promised; **1 hung**; **2 of 3** "
        "continued from a checkpoint; gloo or JAX aborted 2 processes first",
        "3e-07 (of 2)",
    ]
    assert cells["| `dgc`, a long run without a fault"][1] == "**0 of 1**"
    assert "| `zen` | **1 of 2**, 40.5 s |  |" in page
    assert "| `new` | 1 of 1, 1.0 s | 1 of 1 |" in page
    assert "| all | **2 of 3**, 40.5 s | 1 of 1 |" in page
    listed = page.partition("## Not as promised\n\n")[2].partition("\n\n")[0]
    assert listed.splitlines() == [
        "* `zen`, cut, seed 1: `host 2 hung with a 'bar'`",
        "* `dgc`, 700 steps: `a process failed`",
        "* randomized cases of `rows`: `2 failed`",
        "* cases kept from earlier: `1 failed`",
        "* no randomized case covered this path: `rows: two`",
    ]


def test_pictures_are_made_by_their_script(scripts):
    """`python docs/pictures.py` writes what is there."""
    made = {draw.__name__: draw().svg() for draw in scripts("pictures").PICTURES}
    drawn = (ROOT / "docs" / "pictures").glob("*.svg")
    assert made == {path.stem: path.read_text() for path in drawn}

"""docs/errors.md has a section for each class of errors, which shows how it is met."""

import copy
import pathlib
import pickle
import re
import socket
import warnings

import pytest

import sparsejax
from docs.public import REFERENCE
from sparsejax import errors
from sparsejax.jobs.start import facts
from tests import helpers
from tests.helpers import snippets
from tests.test_readme import BLOCK, PAGES, run


PAGE = "docs/errors.md"
INTRODUCTION, *PARTS = re.split(r"^## (\w+)\n", PAGES[PAGE], flags=re.M)
SECTIONS = dict(zip(PARTS[::2], PARTS[1::2], strict=True))
# Users meet the classes below it.
MET = [name for name in snippets.ERRORS if name != "SparsejaxError"]
SHOWN = r"\n\*\*Symptom\.\*\*\n\n```text\n(.*?)```\n\n"
SAID = r"\*\*Cause\.\*\* .*?\.\n\n\*\*Fix\.\*\* .*?\.\n\n"
CODE = r"{}[^\n]*:\n\n{}```python\n.*?```\n"


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What all snippets find, on a host with a name that a page can show."""
    monkeypatch.chdir(tmp_path)  # one saves a checkpoint
    monkeypatch.setattr(socket, "gethostname", lambda: "node2")
    monkeypatch.setattr(facts, "addresses", lambda name: ("127.0.0.1",))
    return snippets.given()


def test_every_class_has_a_section():
    assert {*SECTIONS} == {*snippets.ERRORS}
    assert re.findall(r"^\| \[`(\w+)`\]", INTRODUCTION, re.M) == [*SECTIONS]
    text = (REFERENCE / "errors.md").read_text()
    pairs = re.findall(r":: sparsejax\.errors\.(\w+)\n```\n\n\[.*\]\((.*)\)$", text, re.M)
    assert pairs == [(name, f"../errors.md#{name.lower()}") for name in SECTIONS]


@pytest.mark.parametrize("name", MET)
def test_a_section_has_all_its_parts(name):
    wrong = CODE.format("Wrong", f"<!-- test: raises {name} -->\n")
    pattern = SHOWN + SAID + wrong + "\n" + CODE.format("Right", "") + "\n?"
    assert re.fullmatch(pattern, SECTIONS[name], re.S)


def of(name, kind):
    """The note and the code of a block of a section."""
    blocks = BLOCK.findall(SECTIONS[name])
    (found,) = [block for block in blocks if bool(block[0]) == (kind == "wrong")]
    return found


def more(name):
    """What there is besides: two processes, or TPUs of which nothing was said yet."""
    errors._said.clear()
    if name == "PlatformWarning":
        return {"mesh": helpers.described("tpu", data=4)}
    return snippets.of_two_processes() if name == "UntoldBatchWarning" else {}


@pytest.mark.parametrize("name", MET)
def test_what_is_wrong_raises_what_is_shown(name, names):
    names = run(PAGE, *of(name, "wrong"), names | more(name))
    error = names["raised"].value
    module = "" if isinstance(error, Warning) else "sparsejax.errors."
    shown = " ".join(re.match(SHOWN, SECTIONS[name], re.S)[1].split())
    said = " ".join(f"{module}{name}: {error}".split())
    # What differs from run to run is left out.
    pattern = ".*".join(re.escape(part) for part in shown.split("..."))
    assert re.fullmatch(pattern, said), said


@pytest.mark.parametrize("name", snippets.ERRORS)
def test_what_is_right_raises_nothing(name, names):
    run(PAGE, *of(name, "right"), names | more(name))


def test_nothing_raises_the_base_itself():
    root = pathlib.Path(sparsejax.__file__).parent
    called = re.compile(r"(?<!class )\bSparsejaxError\(")
    assert [path for path in root.rglob("*.py") if called.search(path.read_text())] == []
    assert "No function raises this class." in SECTIONS["SparsejaxError"]


# --- The section that a message ends with.


def section(name):
    return f"See errors.md#{name.lower()} in sparsejax's docs."


@pytest.mark.parametrize("name", snippets.ERRORS)
def test_a_message_ends_with_its_section_once(name):
    error = getattr(errors, name)("no.")
    assert str(error) == f"no. {section(name)}"
    assert error.args == ("no.",)
    assert errors.message(error) == "no."
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)


def test_a_message_that_quotes_another_ends_with_its_own_section():
    inner = errors.StateError("no state.")
    assert str(errors.AxisError(f"{inner} Or so.")) == (
        f"no state. Or so. {section('AxisError')}"
    )
    assert str(errors.JobError(f"two:\n* {inner}\n* {inner}")) == (
        f"two:\n* no state.\n* no state.\n{section('JobError')}"
    )
    assert str(errors.PlanError()) == section("PlanError")


def test_an_error_keeps_its_cause_and_its_state():
    def fail():
        raise errors.BadNumberError("no.") from KeyError("w")

    with pytest.raises(errors.BadNumberError) as raised:
        fail()
    assert isinstance(raised.value.__cause__, KeyError)
    raised.value.state = {"step": 3}
    assert pickle.loads(pickle.dumps(raised.value)).state == {"step": 3}
    # It has arguments of its own.
    error = errors.needs_ranks("it does")
    assert pickle.loads(pickle.dumps(error)).args == error.args


def test_a_warning_is_filtered_by_its_message_and_shown_with_its_section():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "^not this$", errors.DenseGradientWarning)
        for text in ("not this", "this"):
            warnings.warn(text, errors.DenseGradientWarning, stacklevel=1)
    (one,) = caught
    assert section("DenseGradientWarning") in warnings.formatwarning(
        one.message, one.category, "train.py", 1, ""
    )

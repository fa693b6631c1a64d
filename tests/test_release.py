"""The version stands in one place, and what was installed, CHANGELOG and docs follow it."""

import importlib.metadata
import pathlib
import re
import tomllib

import pytest
from packaging import requirements, utils

import sparsejax


ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Mutants are tested in a copy without folders that begin with a dot.
needs_repository = pytest.mark.skipif(
    not (ROOT / ".ci").exists(), reason="there is no .ci here"
)


def test_the_changelog_begins_with_what_is_unreleased_or_with_the_version():
    first = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first is not None
    released = re.fullmatch(r"(\d+\.\d+\.\d+) - \d{4}-\d{2}-\d{2}", first[1])
    assert first[1] == "Unreleased" or released
    assert released is None or released[1] == PROJECT["version"]


def test_the_version_stands_in_one_place():
    """What was installed read it there; a source tree alone has none."""
    assert sparsejax.__version__ == importlib.metadata.version("sparsejax")
    assert sparsejax.__version__ == PROJECT["version"], "pyproject.toml was changed: `make`"
    texts = [*(ROOT / "sparsejax").rglob("*.py"), ROOT / "docs" / "conf.py"]
    assigned = re.compile(r"^\s*(__version__|version|release)\b.*=\s*[\"']\d", re.M)
    assert not [path for path in texts if assigned.search(path.read_text())]


def test_readme_and_documentation_have_the_version_of_the_library():
    configured = (ROOT / "docs" / "conf.py").read_text()
    assert "version = release = sparsejax.__version__\n" in configured
    said = re.findall(r"^This is version (\S+)\. ", (ROOT / "README.md").read_text(), re.M)
    assert said == [".".join(PROJECT["version"].split(".")[:2])]


# --- The packages that CI installs.

LISTS = sorted((ROOT / ".ci" / "requirements").glob("*.txt"))
PINNED = re.compile(r"^(?P<name>[a-z0-9.-]+)==(?P<version>\S+)(?P<hashes>.*)$", re.M)


def pinned(path):
    """The versions that a list has, by name; each package has a version and hashes."""
    lines = re.sub(r"^#.*\n", "", path.read_text().replace("\\\n", ""), flags=re.M)
    found = list(PINNED.finditer(lines))
    assert len(found) == len(lines.splitlines())
    for match in found:
        assert re.fullmatch(r"( +--hash=sha256:[0-9a-f]{64})+", match["hashes"]), match[0]
    return {match["name"]: match["version"] for match in found}


def asked_for(extras):
    """What pyproject.toml asks for with these extras, those of its own among them."""
    texts = list(PROJECT["dependencies"])
    for extra in extras:
        texts += PROJECT["optional-dependencies"][extra]
    for text in texts:
        requirement = requirements.Requirement(text)
        if requirement.name == PROJECT["name"]:
            yield from asked_for(requirement.extras)
        elif requirement.marker is None or requirement.marker.evaluate():
            yield requirement


@needs_repository
def test_the_lists_of_packages_have_what_is_asked_for():
    """Else `make lock`: a list that is older than pyproject.toml is no use."""
    builds = pinned(ROOT / ".ci" / "requirements" / "build.txt")
    assert {"hatchling", "editables"} <= set(builds)
    assert len(LISTS) > 1
    for path in LISTS:
        assert "://" not in path.read_text(), "the address of an index"
        if path.stem == "build":
            continue
        versions = pinned(path)
        assert builds.keys() <= versions.keys()
        for requirement in asked_for(["dev", "docs", "bench"]):
            version = versions[utils.canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), requirement

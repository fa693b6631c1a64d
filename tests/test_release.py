"""The version stands in one place, and what was installed, CHANGELOG and docs follow it."""

import datetime
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
RELEASED = re.compile(r"(?P<version>\d+\.\d+\.\d+) - (?P<day>\d{4}-\d{2}-\d{2})")


def mistake(changelog, version):
    """What is wrong with the headings of a CHANGELOG for a version; "" if nothing is."""
    headings = re.findall(r"^## (.*)$", changelog, re.M)
    if not headings:
        return "it has no heading"
    unreleased = headings[0] == "Unreleased"
    found = [RELEASED.fullmatch(heading) for heading in headings[unreleased:]]
    for heading, match in zip(headings[unreleased:], found, strict=True):
        if match is None:
            return f"{heading!r} is not written 1.2.3 - 2030-12-31"
        try:
            datetime.date.fromisoformat(match["day"])
        except ValueError:
            return f"{heading!r} has no such day"
    numbers = [tuple(map(int, match["version"].split("."))) for match in found if match]
    if numbers != sorted(set(numbers), reverse=True):
        return "its versions do not go down"
    own = tuple(map(int, version.split(".")))
    if not unreleased and numbers[0] != own:
        return f"its first heading is {headings[0]!r}, and the version is {version}"
    if unreleased and numbers and not numbers[0] <= own:
        return f"{headings[1]!r} was released, and the version is {version}"
    return ""


def test_the_changelog_has_a_heading_for_the_version():
    assert not mistake((ROOT / "CHANGELOG.md").read_text(), PROJECT["version"])


@pytest.mark.parametrize(
    ("headings", "match"),
    [
        (["Unreleased", "1.1.9 - 2026-01-02", "1.0.0 - 2025-01-02"], ""),
        (["1.2.0 - 2026-01-02", "1.1.10 - 2025-01-02", "1.1.9 - 2024-01-02"], ""),
        ([], "no heading"),
        (["1.1.0 - 2026-01-02"], "its first heading is '1.1.0 - 2026-01-02', and the"),
        (["Unreleased", "1.3.0 - 2026-01-02"], "'1.3.0 - 2026-01-02' was released, and"),
        (["Unreleased", "1.2.0"], "'1.2.0' is not written"),
        (["1.2.0 - 2026-02-30"], "has no such day"),
        (["Unreleased", "1.1.9 - 2026-01-02", "1.1.10 - 2025-01-02"], "do not go down"),
    ],
)
def test_a_heading_that_does_not_fit_the_version_is_found(headings, match):
    found = mistake("\n\nText.\n\n".join(f"## {heading}" for heading in headings), "1.2.0")
    assert bool(found) == bool(match)
    assert match in found


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

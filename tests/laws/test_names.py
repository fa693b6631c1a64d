"""The names in `sparsejax`: what is there, and what may be imported bare."""

import re
import subprocess
import sys
import types

import pytest

import sparsejax


# What each stands for elsewhere, or what a reader takes it for where no prefix is.
MISTAKABLE = {
    *("apply_updates", "bind", "errors", "explain", "init", "lazy", "local", "lookup"),
    *("metrics", "profile", "sign", "summary", "sync", "threshold", "top_k"),
    *("value_and_grad", "version"),
}
DUNDERS = re.compile("__.*__")


def names():
    return {name for name in dir(sparsejax) if not DUNDERS.fullmatch(name)}


def test_a_star_brings_names_that_say_what_they_are():
    everything = {}
    exec("from sparsejax import *", everything)
    brought = set(everything) - {"__builtins__"}
    assert brought == set(sparsejax.__all__)
    assert 20 <= len(brought) <= 32
    assert not brought & MISTAKABLE
    assert brought <= names()


def test_no_module_shows_but_the_documented_folders():
    modules = {
        name for name in names() if isinstance(getattr(sparsejax, name), types.ModuleType)
    }
    folders = {
        "advise",
        "embrace",
        "errors",
        "rounds",
        "rows",
        "schemes",
        "sparsifiers",
        "transforms",
    }
    assert modules == folders
    assert len(names()) <= 56


def test_all_that_is_imported_to_be_public_is_listed():
    here = {
        name
        for name, value in vars(sparsejax).items()
        if getattr(value, "__module__", "").startswith("sparsejax.")
    }
    assert here <= names()
    for name in names():
        assert getattr(sparsejax, name).__doc__


@pytest.mark.slow
@pytest.mark.parametrize("module", ["sparsejax.transforms", "sparsejax.advise"])
def test_a_folder_can_be_imported_first(module):
    subprocess.run([sys.executable, "-W", "error", "-c", f"import {module}"], check=True)

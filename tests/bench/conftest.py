"""Hosts of the testbed, compiled as tests are."""

import os

import pytest

from benchmarks.testbed import job


@pytest.fixture
def compiled_fast(monkeypatch):
    """Without XLA's optimizations, which take hosts more than half of their time."""
    flags, run = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}, job.run

    def with_flags(*given, environment=None, **options):
        return run(*given, environment=(environment or {}) | flags, **options)

    monkeypatch.setattr(job, "run", with_flags)

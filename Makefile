# Needs Python 3.11 or newer with pip, and make. The first run of a target installs what
# that target needs into .venv, later runs start at once. `make` lists the targets.

# The first Python that is new enough, unless PYTHON names one.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$p && break; done)

# What is added to the command that a target runs, for example ARGS="-k zen".
ARGS ?=

# Where kernels are compiled for a GPU, beside .venv-aot: the oldest JAX, and the newest.
AOT_BESIDE = $(shell $(PYTHON) -c 'import sys; \
	print(".venv-aot-0.10 .venv-aot-0.12" * (sys.version_info >= (3, 12)))' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all fuzz ptx lint docs bench analysis aot device tpu lock audit clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: .venv/demo.stamp  ## Train a language model with dense and with sparse sync
	@.venv/bin/python -m examples.language_model --plot demo.png $(ARGS)

test: .venv/dev.stamp  ## Run the tests that are not slow
	.venv/bin/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-all: .venv/dev.stamp  ## Run all tests
	.venv/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

fuzz: .venv/dev.stamp  ## Check 10,000 randomized cases against the invariants, in half an hour
	@.venv/bin/python -m tests.fuzz $(ARGS)

ptx: .venv/dev.stamp  ## Execute the kernels' PTX on the CPU, in a quarter of an hour
	@.venv/bin/python -m tests.ptx $(ARGS)

lint: .venv/dev.stamp  ## Check style and types
	@! git grep -nE '^(<{7}|[|]{7}|>{7}) ' || { echo "Resolve these merge conflicts." >&2; exit 1; }
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright --pythonpath .venv/bin/python

docs: .venv/docs.stamp  ## Build the documentation; a warning is an error
	@.venv/bin/python -m sphinx -q -W --keep-going docs docs/_build/html $(ARGS)
	@echo "See docs/_build/html/index.html."

bench: .venv/bench.stamp  ## Run the core benchmark
	@.venv/bin/python -m benchmarks.core find
	@.venv/bin/python -m benchmarks.core $(ARGS)

analysis: .venv/bench.stamp  ## Repeat Zen's analysis on the demo's model
	@.venv/bin/python -m benchmarks.papers.zen_analysis $(ARGS)

aot: aot-in-.venv-aot $(AOT_BESIDE:%=aot-in-%)  ## Compile the kernels for a GPU, without one

aot-in-.venv-aot: .venv-aot/aot.stamp
	@.venv-aot/bin/python -m benchmarks.kernels.aot $(ARGS)

aot-in-%: %/aot.stamp
	@$*/bin/python -m benchmarks.kernels.aot --launches $(ARGS)

device: .venv-aot/aot.stamp  ## Count what a step takes of a GPU, without one
	@.venv-aot/bin/python -m benchmarks.device $(ARGS)

tpu: .venv-tpu/tpu.stamp  ## Compile steps for TPUs, without one, in half an hour
	@.venv-tpu/bin/python -m benchmarks.tpu $(ARGS)

lock:  ## Pin the packages that CI installs anew, with their hashes
	@PYTHON="$(PYTHON)" .ci/lock $(ARGS)

audit:  ## Look for known vulnerabilities of these packages
	@PYTHON="$(PYTHON)" .ci/audit

clean:  ## Remove the virtual environments and all caches
	rm -rf .venv .venv-newest .venv-aot* .venv-tpu build dist docs/_build demo.png
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each set of extras: `.venv/dev.stamp` means that `.[dev]` is installed.
.venv/%.stamp: .venv/python.stamp pyproject.toml $(wildcard .ci/requirements/*.txt)
	@echo "Installing sparsejax with what '$*' needs into .venv ..."
	@.ci/install .venv '$*'
	@touch $@

# An environment of its own: with the plugin there, JAX looks for a GPU at every start. XLA
# compiles with the plugin alone, in the version of JAX; the libraries that a GPU needs to run
# are left out. JAX comes first: the extras have to leave it as it is.
.venv-aot/aot.stamp: JAX = jax<0.12
.venv-aot-0.10/aot.stamp .venv-aot-0.12/aot.stamp: JAX = jax==$(@D:.venv-aot-%=%).*
.venv-aot/aot.stamp .venv-aot-0.10/aot.stamp .venv-aot-0.12/aot.stamp: \
		%/aot.stamp: %/python.stamp pyproject.toml
	@echo "Installing $(JAX) with its CUDA plugin into $*, about 900 MB ..."
	@pip="$*/bin/python -m pip --disable-pip-version-check --quiet" && \
		seen() { $*/bin/python -c 'import jax; print(jax.__version__)'; } && \
		$$pip install '$(JAX)' && version=$$(seen) && \
		$$pip install --editable '.[triton,demo]' && \
		{ test "$$(seen)" = $$version || { \
		echo "'.[triton,demo]' puts JAX $$(seen) for $$version." >&2; exit 1; }; } && \
		$$pip install jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	@touch $@

# With libtpu there, JAX looks for a TPU at every start. It comes in the version that JAX asks
# for.
.venv-tpu/tpu.stamp: .venv-tpu/python.stamp pyproject.toml
	@echo "Installing JAX with libtpu into .venv-tpu, about 400 MB ..."
	@.venv-tpu/bin/python -m pip --disable-pip-version-check --quiet install 'jax[tpu]' \
		--editable '.[demo]'
	@touch $@

# Where Python comes without ensurepip, its own pip fills the environment.
.venv/python.stamp .venv-aot/python.stamp .venv-tpu/python.stamp \
		$(AOT_BESIDE:%=%/python.stamp):
	@test -n "$(PYTHON)" || { \
		echo "No Python 3.11 or newer was found; name one with PYTHON=..." >&2; exit 1; }
	@echo "Making a virtual environment in $(@D) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null && $(PYTHON) -m venv $(@D) \
		|| { $(PYTHON) -m venv --without-pip $(@D) \
		&& $(PYTHON) -m pip --python $(@D)/bin/python install --quiet pip; }
	@touch $@

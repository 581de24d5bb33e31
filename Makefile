# make train, make test: nothing else is needed on a machine with Python 3.10 to 3.13.
PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.titanmoe-installed
INSTALL := $(BIN)/python -m pip install $(if $(shell command -v nvidia-smi),,-c scripts/constraints_cpu.txt) $(PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup train lint test slow check docs

help:
	@echo 'make train   set up .venv if needed and train a small folded MoE on this machine'
	@echo '             options of the run: make train ARGS="--training.steps 20"'
	@echo 'make test    set up .venv if needed, check style and types, run the tests'
	@echo '             options of pytest:  make test ARGS="-k fold -x"'
	@echo 'make slow    run the tests that make test leaves out because they are long, and property tests with a new seed'
	@echo 'make check   for every edit, in less than a minute: style, types, mappings, configs, one parity case of each axis'
	@echo 'make lint    check style and types only (ruff, mypy)'
	@echo 'make docs    make a site of README.md and docs/ in build/site, and check its links'
	@echo 'make setup   set up .venv only'
	@echo
	@echo 'PYTHON=python3.12     the Python that .venv is made from (3.10 to 3.13)'
	@echo 'PIP_ARGS="..."        options of pip; without a GPU the smaller PyTorch:'
	@echo '                      PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"'

setup: $(STAMP)

# The stamp is newer than what it was made from, so a second make starts at once.
$(STAMP): pyproject.toml scripts/constraints_cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "titanmoe needs Python 3.10 or newer, '$(PYTHON)' is $$($(PYTHON) --version 2>&1): make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(INSTALL) -e '.[dev]'
	@touch $@

train: setup
	@$(BIN)/python scripts/quickstart.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One thread per process: the tests run many processes, and threads that share a core wait for each other. Two workers,
# each with ranks of its own: where those of one wait for messages, those of the other compute.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test: lint
	$(PYTEST) $(ARGS)

# Property tests too, with other examples each time. A seed repeats them: make slow SEED=...
SEED := $(shell date +%s)

slow: setup
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile varied --hypothesis-seed $(SEED) $(ARGS)

check: lint
	$(PYTEST) -q tests/fold tests/config tests/test_parity.py::test_each_axis_alone $(ARGS)

DOCS_STAMP := $(VENV)/.titanmoe-docs-installed

$(DOCS_STAMP): $(STAMP)
	$(INSTALL) -e '.[docs]'
	@touch $@

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

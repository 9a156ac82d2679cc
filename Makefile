# Two commands matter: `make run` shows what the library does, `make test` shows that it does it. Its workers are one
# more than the cores that it is made for, because some tests wait for processes.
SHELL   := bash
PYTHON  ?=
WORKERS ?= 3
BIN     := .venv/bin
PIP     := $(BIN)/python -m pip --quiet --disable-pip-version-check
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup run test check bench bench-topk bench-padding bench-models torture clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.ready ## create .venv and install the pinned packages, unless that is done

run: setup ## summarise the built-in article with the bundled model, and show what was kept of it
	$(BIN)/pyramidion explain --text --output explained.html

test: setup ## run every test; those that need a GPU skip themselves without one
	$(PYTEST)

check: setup ## lint, formatting, types and the quick tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow and not gpu"

bench: bench-topk bench-padding bench-models ## run every benchmark, as far as this machine can (an hour on a CPU)

bench-topk: setup ## measure the top-k operators against each other
	$(BIN)/pyramidion bench topk

bench-padding: setup ## measure documents of mixed lengths in one batch
	$(BIN)/pyramidion bench padding

bench-models: setup ## measure our models beside their peers: lengths, writing, the paper's tables; run again to go on
	for what in models length generate table profile; do $(BIN)/pyramidion bench $$what --limit-seconds 600 || exit 1; done

torture: setup ## kill runs, damage checkpoints, and see that nothing is lost (half an hour)
	OMP_NUM_THREADS=1 $(BIN)/pyramidion bench torture

clean: ## remove caches and build output; .venv stays
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

# The build backend comes first and builds without isolation, so that its version is pinned as well.
.venv/.ready: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing pyramidion[dev] into .venv, versions from constraints.txt"
	@$(PIP) install --constraint constraints.txt setuptools
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

.venv/bin/python:
	@for python in $(PYTHON) python3.11 python3; do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "Creating .venv with $$("$$python" --version)"; \
	        exec "$$python" -m venv .venv; \
	    fi; \
	done; \
	echo "Python 3.11 or newer is needed and was not found; name one with make setup PYTHON=..." >&2; \
	exit 1

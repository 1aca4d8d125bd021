# `make demo`, `make test` and `make docs` do their own set-up: they need Python 3.10+ with pip and venv, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO ?= demo
DEMO_FILMS ?= 800
DEMO_EPOCHS ?= 20
WORKERS ?= 2

.PHONY: demo test lint bench docs clean
.DEFAULT_GOAL := test

# Installed again only when the dependencies change.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("afire needs Python 3.10 or newer; set PYTHON=python3.x") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,docs]"
	@touch $@

# A file stays with one process, so that what its tests share is made once; tests/conftest.py puts the long files first.
# The tests start many processes: what one of them has compiled, the next ones need not.
test: $(READY)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check afire tests benchmarks scripts
	$(BIN)/mypy

demo: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/demo.sh $(DEMO) $(DEMO_FILMS) $(DEMO_EPOCHS)

# docs/benchmarks.md, about twenty-five minutes on two idle cores; BENCH="--only losses,step" measures some sections again.
bench: $(READY)
	$(BIN)/python benchmarks/page.py $(BENCH)

# site/index.html opens from disk; a link or an anchor that leads nowhere is an error (not with --quiet, which hides them).
docs: $(READY)
	$(BIN)/python -m mkdocs build --strict --site-dir site
	@echo site/index.html

clean:
	rm -rf $(DEMO) site .pytest_cache .mypy_cache .ruff_cache

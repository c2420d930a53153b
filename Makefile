# Two commands do everything on a machine that has only Python 3.11+, its venv module and make:
#   make demo    makes the venv, installs, and runs the main job
#   make test    makes the venv, installs, and runs all tests, doctests, linters and type checks

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow lint install clean

demo: $(STAMP)
	$(BIN)/torchcalib demo --out demo-report

test: $(STAMP) lint
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first and alone, so that no other package's range picks a build of it
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) demo-report

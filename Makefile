# Required: Python 3.11+, its venv module and make.
#   make demo       create the venv, install the demo requirements, and run the demo
#   make test       create the venv, install the development tools, and run ruff, tests and doctests (5 to 9 minutes)
#
# For maintainers and CI:
#   make test-all   run what `make test` omits: types, layers, extended tests, other environments, lowest versions
#   make docs       build the documentation in docs/_build/html, with warnings as errors, and check its links
#   make speed      compare a few ratios of times with the stored ones; never fails
#   make dist       build the wheel and the source distribution in dist/, and check them
#   make coverage   run `make test`, and measure coverage of lines and branches
#   make pages | test-engines | test-logs   test pages on MONAI and Evidently; Ray, Spark and Dask; lm-eval and Inspect,
#                   in environments of their own
#   make test-sklearn   run scikit-learn's own tests of calibration on torchcalib.sklearn
#   make soak | fuzz | statistics | mutants | tables   long tests (up to hours) of the code that changed

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
PAGES := .venv-pages
ENGINES := .venv-engines
LOGS := .venv-logs
EMPTY := .venv-empty
# Python compiles the imported files, a small part of those that pip would compile.
PIP_INSTALL := -m pip install --quiet --no-compile --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest
TWO_CORES := --numprocesses 2 --dist worksteal
QUIET := -q --no-header -p no:cacheprovider
# Tests of numerical code; messages, options, states, surfaces and layouts do not depend on the instruction set
NUMERICAL := tests/ops tests/special tests/metrics/streaming tests/contract \
    $(addprefix --ignore tests/contract/test_,messages.py options.py laws_of_states.py saved_form.py laws_of_surfaces.py \
    layouts.py)
# Tests of code that calls other packages than torch
DEPENDENT := tests/cli tests/display tests/io tests/ops tests/plots tests/project tests/reporting \
    tests/contract/test_oracles.py tests/contract/test_recorded.py tests/integrations/test_ignite.py \
    tests/integrations/monitoring tests/integrations/test_logging.py tests/integrations/test_torchmetrics_names.py \
    --ignore tests/reporting/test_decision.py
METRICS ?= tests/metrics  # run by `lowest`

# The tests start many processes, which share their bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all lint types extended matrix lowest test-engines test-logs test-sklearn wheel-test pages speed docs dist coverage soak fuzz statistics mutants tables install clean

demo: $(VENV)/.demo
	$(BIN)/torchcalib demo --out demo-report

TEST_OPTIONS ?=
test: $(VENV)/.dev lint
	$(PYTEST) $(TWO_CORES) $(TEST_OPTIONS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test-all: types extended matrix lowest test-engines test-logs test-sklearn wheel-test

types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/lint-imports

EXTENDED ?=  # options of pytest
extended: $(VENV)/.dev
	TORCHCALIB_NUMBA=always $(PYTEST) $(QUIET) $(TWO_CORES) -m "extended and not long" $(EXTENDED)

# Kernels without numba; and compiled loops for input of any size, with another instruction set and another number of
# threads. `lowest` runs without vector instructions.
matrix: $(VENV)/.dev
	TORCHCALIB_TEST_WITHOUT=numba $(PYTEST) $(QUIET) $(TWO_CORES) tests/ops
	TORCHCALIB_NUMBA=always ATEN_CPU_CAPABILITY=avx2 TORCHCALIB_TEST_THREADS=4 $(PYTEST) $(QUIET) $(TWO_CORES) $(NUMERICAL)

# Lowest versions allowed by pyproject.toml, except for torch, whose older builds install several GB of CUDA packages.
# `make lowest LOWEST_TORCH=2.8.0` also installs an older torch.
LOWEST_TORCH ?=
lowest: $(LOWEST)/.installed
	# old packages warn about newer dependencies
	ATEN_CPU_CAPABILITY=default NUMBA_CPU_NAME=generic $(LOWEST)/bin/python -m pytest $(QUIET) $(TWO_CORES) -W ignore::DeprecationWarning $(DEPENDENT) $(METRICS)

# Both packages have many requirements, and Evidently needs an older pandas.
pages: $(PAGES)/.installed
	$(PAGES)/bin/python -m pytest $(QUIET) -W ignore -m extended tests/project/test_snippets.py -k "monai or evidently"
	$(PAGES)/bin/python -m pytest $(QUIET) -W ignore tests/integrations/test_monai.py

# Ray, Spark and Dask on this machine. Without Java, the tests of Spark are skipped.
test-engines: $(ENGINES)/.installed
	$(ENGINES)/bin/python -m pytest $(QUIET) tests/engines/test_engines.py
	$(ENGINES)/bin/python -m pytest $(QUIET) tests/engines/test_page.py

# Logs that lm-eval and Inspect write, and their metrics
test-logs: $(LOGS)/.installed
	$(LOGS)/bin/python -m pytest $(QUIET) -W ignore tests/logs

# The tests are those in the installed package of scikit-learn.
test-sklearn: $(VENV)/.dev
	$(BIN)/python tests/processes/sklearn_tests.py

# A short benchmark that lists ratios of times above the stored ones, and never fails
speed: $(VENV)/.dev
	-$(BIN)/python -m benchmarks.run one_pass --job "ECE, 50,000 x 1,000" --check --trial 3

docs: $(VENV)/.docs
	$(BIN)/python docs/pictures.py
	$(BIN)/python -m sphinx -W --keep-going --jobs 2 -b html docs docs/_build/html
	$(BIN)/python docs/check_links.py

# `build` makes the wheel from the source distribution. The pinned setuptools of the venv is used. Nothing is imported.
dist: $(VENV)/.release
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*

# Install the source distribution in an empty venv, then the wheel with more, and run each outside of the checkout
wheel-test: dist
	$(PYTHON) -m venv --clear $(EMPTY)
	$(EMPTY)/bin/python $(PIP_INSTALL) torch
	$(EMPTY)/bin/python $(PIP_INSTALL) "$$(echo dist/*.tar.gz)[report]"
	$(EMPTY)/bin/python -m pip check
	$(EMPTY)/bin/python -I tests/processes/installed.py
	$(EMPTY)/bin/python -m pip uninstall --quiet --yes torchcalib
	$(EMPTY)/bin/python $(PIP_INSTALL) "$$(echo dist/*.whl)[report,lightning]"
	$(EMPTY)/bin/python -m pip check
	$(EMPTY)/bin/python -I tests/processes/installed.py --train
	rm -rf $(EMPTY)

coverage:
	$(MAKE) test TEST_OPTIONS="--cov --cov-report= --cov-fail-under=0"
	$(BIN)/python -m coverage report --skip-covered

soak: $(VENV)/.dev
	$(PYTEST) -m long tests/metrics/streaming/test_faults.py tests/contract/test_laws_of_states.py

# Random input for every metric, random changes of saved states, then 10 minutes for each file format; files in `fuzz/` that are not in a folder are findings
FUZZED := npz npy pt safetensors csv csv.gz tsv json jsonl jsonl.gz parquet state calibrator
FUZZ_SECONDS ?= 600
fuzz: $(VENV)/.dev
	$(PYTEST) -m long tests/contract/test_fuzz.py tests/contract/test_saved_form.py
	$(BIN)/python $(PIP_INSTALL) --editable ".[fuzz]"
	for format in $(FUZZED); do \
	    PYTHONPATH=tests $(BIN)/python tests/processes/fuzz_files.py $$format fuzz -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

statistics: $(VENV)/.dev
	$(PYTEST) $(TWO_CORES) -m long --timeout 3600 tests/inference tests/calibration

mutants: $(VENV)/.dev
	$(BIN)/python tests/mutants.py

tables: $(VENV)/.dev
	$(BIN)/python $(PIP_INSTALL) --editable ".[benchmarks]"
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.power

install: $(VENV)/.dev

# Install torch first, so that the requirements of other packages do not select its build
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) torch
	$(BIN)/python $(PIP_INSTALL) --editable ".[demo]"
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python $(PIP_INSTALL) --editable ".[dev]"
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(BIN)/python $(PIP_INSTALL) --editable ".[docs]"
	touch $@

$(VENV)/.release: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) build setuptools twine
	touch $@

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --no-compile $(if $(LOWEST_TORCH),torch==$(LOWEST_TORCH),--constraint constraints.txt torch)
	$(LOWEST)/bin/python -m pip install --quiet --no-compile --constraint constraints-lowest.txt --editable ".[report,pandas,data,demo,fast,ignite,tensorboard,test]"
	touch $@

$(PAGES)/.installed: pyproject.toml
	test -x $(PAGES)/bin/python || $(PYTHON) -m venv $(PAGES)
	$(PAGES)/bin/python $(PIP_INSTALL) torch
	$(PAGES)/bin/python -m pip install --quiet --no-compile --editable ".[pages]"
	touch $@

$(ENGINES)/.installed: pyproject.toml constraints.txt
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python $(PIP_INSTALL) torch
	$(ENGINES)/bin/python $(PIP_INSTALL) --editable ".[engines]"
	touch $@

$(LOGS)/.installed: pyproject.toml constraints.txt
	test -x $(LOGS)/bin/python || $(PYTHON) -m venv $(LOGS)
	$(LOGS)/bin/python $(PIP_INSTALL) torch
	$(LOGS)/bin/python $(PIP_INSTALL) --editable ".[log-tools]"
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) $(PAGES) $(ENGINES) $(LOGS) $(EMPTY) build dist demo-report docs/_build fuzz

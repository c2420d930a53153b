"""Settings and fixtures that all tests share."""

import json
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import formulas, paths
from hypothesis import settings

settings.register_profile("here", deadline=None, derandomize=True)  # the same cases in every run, without time limits
settings.load_profile("here")
LEFT_OUT = list(filter(None, os.environ.get("TORCHCALIB_TEST_WITHOUT", "").split(",")))
sys.modules.update(dict.fromkeys(LEFT_OUT))  # as if they were not installed
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # Processes that share a cache can load the code of another signature while it is being written, which rounds
    # differently: numba does not lock its index.
    os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(sys.prefix) / "numba-cache" / worker))
# On small tensors and busy cores several threads are slower than one.
torch.set_num_threads(int(os.environ.get("TORCHCALIB_TEST_THREADS", "1")))


def pytest_configure(config):
    # Collecting the doctests of a module that cannot be imported leaves half of it in `sys.modules`.
    config.option.ignore_glob = [*(config.option.ignore_glob or []), *(f"*/ops/*{name}*.py" for name in LEFT_OUT)]


def pytest_report_header():
    return None if torch.cuda.is_available() else "no CUDA device: tests marked `cuda` are not collected"


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    config.hook.pytest_deselected(items=[item for item in items if "cuda" in item.keywords])
    items[:] = [item for item in items if "cuda" not in item.keywords]


@pytest.fixture(params=paths())
def path(request):
    """A case for each path from input to state; in the extended run one of each class and path."""
    return request.param


@pytest.fixture(params=formulas())
def formula(request):
    """A case for each formula on top of a state; in the extended run one of each setting."""
    return request.param


def data_folder():
    """Folder of recorded inputs with known answers: $TORCHCALIB_DATA, or ../shared/data beside the project."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("TORCHCALIB_DATA", default))


@pytest.fixture(scope="session")
def expected():
    """All recorded answers: a list of {file, case, metric, args, value, tolerance}."""
    path = data_folder() / "expected.json"
    if not path.is_file():
        pytest.skip(f"recorded answers are not in {path.parent}; set TORCHCALIB_DATA")
    return json.loads(path.read_text())


@pytest.fixture(scope="session")
def recorded(expected):
    """Return a function that loads a recorded input by name."""

    @cache
    def load(name):
        with np.load(data_folder() / name, allow_pickle=False) as arrays:
            return {key: torch.from_numpy(array) for key, array in arrays.items()}

    return load

"""What `import torchcalib` loads, in fresh processes; and that data flows one way."""

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from processes import quick_environment

OPTIONAL = {
    *("matplotlib", "rich", "jinja2", "pyarrow", "safetensors", "sklearn", "scipy", "pandas", "hypothesis"),
    *("numba", "triton", "lightning", "pytorch_lightning", "transformers", "accelerate"),
}
TORCH = (
    # torchmetrics imports what it finds installed, transformers and matplotlib with it; here it is to find nothing
    "import lightning_utilities.core.imports as found; found.RequirementCache.__bool__ = lambda self: False; "
    "import torch, torchmetrics"
)
PRINT = "; import sys, json; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"


@cache
def loaded(code):
    """Top-level packages that are loaded once `code` has run in a fresh process."""
    done = subprocess.run([sys.executable, "-c", code + PRINT], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.fixture(scope="module")
def without():
    return loaded(TORCH)


def test_import_loads_no_optional_package(without):
    more = loaded(TORCH + ", torchcalib") - without
    assert more & OPTIONAL == set()
    assert {name for name in more if not name.startswith("__editable__")} <= {"torchcalib"} | sys.stdlib_module_names


def test_the_detector_can_fail(without):
    """The twin of the test above: a module that does load optional packages is found out."""
    packages = {name for name in ("rich", "jinja2", "pyarrow", "matplotlib") if importlib.util.find_spec(name)}
    assert packages <= loaded(f"{TORCH}, torchcalib, {', '.join(sorted(packages))}" if packages else TORCH) - without


MISSING = """
import importlib, sys
import torch, torchcalib
for line in sys.argv[1:]:
    module, package, extra = line.split()
    sys.modules[package] = None
    try:
        importlib.import_module(f"torchcalib.{module}")
    except ImportError as error:
        assert f"pip install 'torchcalib[{extra}]'" in str(error), error
    else:
        raise AssertionError(f"{module} was imported without {package}")
    del sys.modules[package]
"""


def test_a_missing_extra_is_named():
    modules = ["plots matplotlib plot", "html jinja2 report", "terminal rich report", "demo sklearn demo"]
    modules += ["integrations.huggingface accelerate huggingface"]
    done = subprocess.run(
        [sys.executable, "-c", MISSING, *modules], env=quick_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_extra_at_the_command_line_is_one_line(tmp_path):
    path = tmp_path / "x.npz"
    path.touch()
    code = "import sys; sys.modules['rich'] = None; from torchcalib.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(path)],
        env=quick_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("torchcalib: error: ")
    assert "torchcalib[report]" in done.stderr


def test_every_public_name_is_there_and_documented():
    import torchcalib as tc

    assert set(tc.__all__) <= set(dir(tc))
    lazy = {"save_report", "bin_comparison", "confidence_histogram", "ecd_curve", "reliability_diagram"}
    lazy |= {"tce_diagram", "save_comparison", "difference_plot", "training_curve"}
    assert lazy | {"CalibrationMonitor"} <= set(dir(tc))
    drawn = lazy if importlib.util.find_spec("matplotlib") and importlib.util.find_spec("jinja2") else set()
    for name in {*tc.__all__, *drawn}:
        assert name == "__version__" or (getattr(tc, name).__doc__ or "").strip(), name
    with pytest.raises(AttributeError, match="no attribute 'ecee'"):
        _ = tc.ecee


def test_data_flows_one_way():
    linter = Path(sys.executable).parent / "lint-imports"
    if not linter.is_file():
        pytest.skip("import-linter is not installed")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([str(linter)], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

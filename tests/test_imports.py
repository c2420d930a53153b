"""What `import torchcalib` loads, in fresh processes; and that data flows one way."""

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

OPTIONAL = {
    *("matplotlib", "rich", "jinja2", "pyarrow", "safetensors", "sklearn", "scipy", "pandas", "hypothesis"),
    *("numba", "triton", "lightning", "pytorch_lightning", "transformers"),
}
TORCH = "import torch, torchmetrics"
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


@pytest.mark.parametrize("package", ["rich", "pyarrow"])  # which torchmetrics does not load by way of transformers
def test_the_detector_can_fail(without, package):
    """The twin of the test above: a module that does load an optional package is found out."""
    pytest.importorskip(package)
    assert (loaded(f"{TORCH}, torchcalib, {package}") - without) & OPTIONAL


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("plots", "matplotlib", "plot"), ("html", "jinja2", "report"), ("terminal", "rich", "report"),
     ("demo", "sklearn", "demo")],
)  # fmt: skip
def test_a_missing_extra_is_named(module, package, extra):
    code = f"import sys, torchcalib; sys.modules[{package!r}] = None; import torchcalib.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"pip install 'torchcalib[{extra}]'" in done.stderr.splitlines()[-1]


def test_a_missing_extra_at_the_command_line_is_one_line(tmp_path):
    code = (
        "import sys; sys.modules['rich'] = None; from torchcalib.cli import main; sys.exit(main(['report', 'x.npz']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("torchcalib: error: ")
    assert "torchcalib[report]" in done.stderr


def test_every_public_name_is_there_and_documented():
    import torchcalib as tc

    assert set(tc.__all__) <= set(dir(tc))
    lazy = {"save_report", "bin_comparison", "confidence_histogram", "ecd_curve", "reliability_diagram"}
    lazy |= {"tce_diagram", "training_curve"}
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
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([str(linter)], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

"""Modules loaded by `import torchcalib`, in a fresh process, the public names, and what an editor shows of them."""

import json
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from helpers.prediction_files import write_parquet
from processes import ROOT, run_python

import torchcalib as tc

OPTIONAL = {
    *("matplotlib", "rich", "jinja2", "pyarrow", "safetensors", "sklearn", "scipy", "pandas", "hypothesis"),
    *("numba", "triton", "lightning", "pytorch_lightning", "transformers", "accelerate", "ignite"),
    *("mlflow", "wandb", "tensorboard"),
    *("ray", "pyspark", "dask"),
}
EXTRAS = {  # module: (package, extra that installs it)
    "plots": ("matplotlib", "plot"),
    "reporting.render.html": ("jinja2", "report"),
    "cli.demo": ("sklearn", "demo"),
    "integrations.huggingface": ("accelerate", "huggingface"),
    "sklearn": ("sklearn", "sklearn"),
    "integrations.ignite": ("ignite", "ignite"),
    "integrations.arrow": ("pyarrow", "data"),
    "integrations.ray": ("ray", "ray"),
    "integrations.spark": ("pyspark", "spark"),
    "integrations.dask": ("dask", "dask"),
}
# torchmetrics imports optional packages if they are installed. Here it must find none.
PROCESS = """
import contextlib, importlib, importlib.util, io, json, sys
import lightning_utilities.core.imports as found
found.RequirementCache.__bool__ = lambda self: False
import torch, torchmetrics

def loaded():
    return {name.partition(".")[0] for name in sys.modules}

extras, path = json.loads(sys.argv[1]), sys.argv[2]
before = loaded()
import torchcalib
by_import = loaded() - before
errors = {}
for module, (package, _) in extras.items():
    sys.modules[package] = None
    try:
        importlib.import_module("torchcalib." + module)
    except ImportError as error:
        errors[module] = str(error)
    del sys.modules[package]
from torchcalib.cli import main
sys.modules["jinja2"] = None
with contextlib.redirect_stderr(io.StringIO()) as output:
    code = main(["report", path, "--out", path + ".html"])
del sys.modules["jinja2"]
present = [name for name in ("rich", "jinja2", "matplotlib") if importlib.util.find_spec(name)]
for name in present:
    importlib.import_module(name)
unseen = set(present) - (loaded() - before)
print(json.dumps([sorted(by_import), errors, code, output.getvalue(), sorted(unseen)]))
"""


def test_import_loads_no_optional_package_and_errors_name_the_missing_extra(tmp_path):
    np.savez(tmp_path / "x.npz", probs=np.array([0.2, 0.7]), labels=np.array([0, 1]))
    done = run_python("-c", PROCESS, json.dumps(EXTRAS), tmp_path / "x.npz")
    assert done.returncode == 0, done.stderr
    loaded, errors, code, output, unseen = json.loads(done.stdout)
    assert set(loaded) & OPTIONAL == set()
    assert {name for name in loaded if not name.startswith("__editable__")} <= {"torchcalib"} | sys.stdlib_module_names
    assert unseen == [], "the test must detect imported packages"
    for module, (_, extra) in EXTRAS.items():
        assert f"pip install 'torchcalib[{extra}]'" in errors[module], module
    assert (code, output.count("\n")) == (2, 1)
    assert output.startswith("torchcalib: error: ")
    assert "torchcalib[report]" in output


def test_flat_names_are_the_objects_of_the_namespaces():
    assert dir(tc) == sorted(tc.__all__)
    for space in (tc.functional, tc.calibration, tc.inference, tc.plots):
        assert set(dir(space)) >= set(space.__all__)
        missing = {name for name in space.__all__ if name.islower()} - set(dir(tc))
        assert missing == set()
        for name in set(space.__all__) & set(dir(tc)) - {"risk_coverage_curve"}:
            assert getattr(tc, name) is getattr(space, name)
    assert set(tc.calibration.__all__) <= set(dir(tc))
    assert tc.risk_coverage_curve is tc.functional.risk_coverage_curve


BLOCKED = """
import sys
import torchcalib
print("torch" not in sys.modules)
sys.modules.update(dict.fromkeys(("torchmetrics", "matplotlib", "pandas", "numba", "rich", "scipy", "sklearn")))
import torch
before = set(sys.modules)
torchcalib.ece([0.1, 0.9], [0, 1])
print(sum(name.startswith("torchcalib") for name in sys.modules) <= 30, "numpy.ma" not in sys.modules)
from torchcalib.cli import main
before |= set(sys.modules)
g = torch.Generator().manual_seed(0)
logits = torch.randn(60, 3, generator=g)
labels = torch.distributions.Categorical(logits=logits).sample()
with open(sys.argv[1], "w") as file:
    file.write("p,y\\n" + "".join(f"{k / 100},{int(k * 7 % 100 < k)}\\n" for k in range(1, 100, 3)))
how = {"task": "multiclass", "from_logits": True}
print(torchcalib.ece(logits, labels, **how).item() > 0)
print(torchcalib.report(logits, labels, **how).n)
print({"sympy", "torch._dynamo", "torch._inductor"}.isdisjoint(set(sys.modules) - before))
print(len(torchcalib.compare({"a": logits, "b": 2 * logits}, labels, **how).lines) > 0)
print(torchcalib.TemperatureScaling().fit(logits, labels).temperature > 0)
print(torchcalib.losses.SoftBinnedECELoss(**how)(logits, labels) > 0)
print(len(torchcalib.audit([{"id": k, "confidence": k, "correct": k > 50} for k in range(100)]).confidences) == 1)
print(main(["check", sys.argv[1]]), main(["ece", sys.argv[1]]))
print(main(["report", sys.argv[1]]), main(["compare", sys.argv[1], "other=" + sys.argv[1]]))
"""


def test_all_but_classes_and_pages_need_no_other_package_than_torch(tmp_path):
    """`import torchcalib` does not import torch, the first `ece` imports few modules, and a report no compiler."""
    done = run_python("-c", BLOCKED, tmp_path / "a.csv")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("True") == 9, done.stdout
    assert done.stdout.rstrip().endswith("0 0"), done.stdout


PAGES = ("jinja2", "matplotlib", "torchcalib.plots", "torchcalib.reporting.render.html")
NO_TORCH = ("torch", "torchcalib.core", "numpy", "pyarrow", "numba", "rich", *PAGES)
COMPUTED = ("pandas", "sklearn", "torch._dynamo", "torch._inductor", "sympy", *PAGES)
AT_ONCE = ("report missing.csv", "merge missing.pt", "compare a=missing.csv missing.npy", "apply missing.pt x.npz")
OF_HEADERS = (
    "report x.csv --target no",
    "report x.csv --n-bins 0",
    "report x.npz --preds no",
    "report x.jsonl --weights no",
    "report x.parquet --clusters no",
    "report x.npz --task multiclass",
    "report x.npz --save-calibrator no/c.pt",
    "metric no x.npz",
    "metric ece x.npz --mode no",
    "check x.npz --fail-if ece>>1",
    "plot x.npz --out x.gif",
    "compare x.npz x.csv --preds no",
    "calibrate x.npz --out c.pt --calibrator no",
    "apply x.npz x.csv --preds no --out c.csv",
)
NO_PACKAGE = (*NO_TORCH, "torchmetrics", "pandas", "scipy", "sklearn", "transformers")
NEEDLESS = [  # a command, its exit code, and modules that it must not import; commands that need fewer modules first
    *((words, 0, NO_PACKAGE) for words in ("--help", "report --help", "compare --help", "--version", "")),
    ("reprot x.csv", 2, NO_TORCH),
    ("report x.csv --max-ece 1", 2, NO_TORCH),
    *((words, 2, NO_PACKAGE) for words in AT_ONCE),
    ("audit missing.jsonl", 2, ("torch", "torchcalib.core", "numba", *PAGES)),
    ("report unknown.csv", 2, ("torch", "torchcalib.core", "numba", *PAGES)),
    *((words, 2, [name for name in NO_PACKAGE if name not in ("numpy", "pyarrow")]) for words in OF_HEADERS),
    ("metric ece x.csv", 0, (*COMPUTED, "rich", "torchcalib.reporting", "torchcalib.calibration")),
    ("watch x.csv", 0, (*COMPUTED, "rich", "torchcalib.reporting", "torchcalib.calibration")),
    ("check x.csv", 0, (*COMPUTED, "rich", "torchcalib.reporting.render")),
    ("report x.csv --no-intervals --no-calibration", 0, COMPUTED),
    ("audit log.jsonl --no-intervals --no-calibration", 0, COMPUTED),
]
RUN = """
import contextlib, importlib.abc, io, json, os, sys
import lightning_utilities.core.imports as found  # torchmetrics finds no optional package
found.RequirementCache.__bool__ = lambda self: False

class Refused(importlib.abc.MetaPathFinder):
    names = ()
    def find_spec(self, name, path=None, target=None):
        if any(name == refused or name.startswith(refused + ".") for refused in self.names):
            raise ModuleNotFoundError(f"needless import of {name}", name=name)

refused = Refused()
sys.meta_path.insert(0, refused)
os.chdir(sys.argv[2])
from torchcalib.cli import main
for words, code, refused.names in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            returned = main(words.split())
        except SystemExit as error:
            returned = error.code
    if returned != code or "needless" in errors.getvalue() or {*refused.names} & {*sys.modules}:
        print(words, returned, errors.getvalue(), {*refused.names} & {*sys.modules})
"""


def test_commands_import_only_what_they_need(tmp_path):
    rng = np.random.default_rng(0)
    p = rng.uniform(size=40).round(3)
    rows = [f"{q},{int(rng.uniform() < q)}" for q in p]
    (tmp_path / "x.csv").write_text("\n".join(["prob,label", *rows]))
    (tmp_path / "unknown.csv").write_text("colour,size\nred,3\n")
    columns = {"prob": p[:3], "label": np.arange(3) % 2}
    np.savez(tmp_path / "x.npz", **columns)
    write_parquet(tmp_path / "x.parquet", columns)
    (tmp_path / "x.jsonl").write_text('{"prob": 0.2, "label": 0}\n')
    lines = [{"item_id": k, "gold": "yes", "probs": {"yes": q, "no": 1 - q}} for k, q in enumerate(p.tolist())]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = run_python("-c", RUN, json.dumps(NEEDLESS), tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_package_data_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = ROOT / "torchcalib"
    installed = {path for pattern in settings["package-data"]["torchcalib"] for path in package.glob(pattern)}
    there = {
        path for path in package.rglob("*") if path.suffix in (".pyi", ".jinja", ".json") or path.name == "py.typed"
    }
    assert there == installed


USE = """
import torch
import torchcalib
from torchcalib.functional import InputOptions, cox, ece, nll

preds, target = torch.tensor([0.2, 0.7]), torch.tensor([0, 1])
options: InputOptions = {"from_logits": False}
reveal_type(ece(preds, target, "binary", n_bins=5, **options))
reveal_type(nll(preds, target, task="binary", reduction="none"))
reveal_type(cox(preds, target, task="binary").slope)
metric = torchcalib.ECE(task="binary", n_bins=5)
reveal_type(metric.compute())
reveal_type(metric.name)
ece(preds, target, task="binary", nbins=5)
"""


@pytest.mark.extended  # mypy takes a minute without its cache
def test_mypy_infers_types_and_finds_unknown_options(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "use.py").write_text(USE)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(tmp_path / "use.py")]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    types = [line.partition("Revealed type is ")[2].replace("builtins.", "").strip('"') for line in found.splitlines()]
    assert [name for name in types if name] == ["torch._tensor.Tensor"] * 4 + ["str"], found
    assert 'Unexpected keyword argument "nbins" for "ece"' in found
    assert found.count("error:") == 1, found


def test_editor_shows_signature_and_docstring_on_hover():
    jedi = pytest.importorskip("jedi")
    script = jedi.Script("from torchcalib.functional import ece\nvalue = ece(", project=jedi.Project(ROOT))
    (hover,) = script.help(2, 9)
    assert hover.docstring().startswith("ece(task: Task | None=None, *, n_bins: int=15, debiased: bool=False")
    assert "The weighted mean of |frequency - confidence|".lower() in hover.docstring().lower()

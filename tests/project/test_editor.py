"""What an editor and a type checker show of a metric, from the source alone."""

import subprocess
import sys

import pytest
from processes import ROOT

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

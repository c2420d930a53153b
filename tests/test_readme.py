"""Every Python snippet of the README runs."""

import re
from pathlib import Path

import pytest
import torch

import torchcalib
from torchcalib.streaming import StreamingMetric

# of Lightning: what it thinks of a tiny data set, and a name of torch that it still uses
LIGHTNING = ("ignore:The '.*_dataloader' does not have many workers", "ignore:.*isinstance.treespec, LeafSpec.*")
pytestmark = [pytest.mark.filterwarnings(ignored) for ignored in LIGHTNING]

TEXT = (Path(__file__).resolve().parents[1] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_runs(snippet, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    batches = [(torch.randn(4, 10), torch.randint(0, 10, (4,))) for _ in range(2)]
    exec(compile(snippet, "README.md", "exec"), {"torchcalib": torchcalib, "batches": batches})
    assert capsys.readouterr().out


def test_there_are_snippets_and_every_metric_is_in_the_table():
    assert len(SNIPPETS) >= 6
    named = set(re.findall(r"`([A-Z]\w+)`", " ".join(line for line in TEXT.splitlines() if line.startswith("| `"))))
    public = [getattr(torchcalib, name) for name in torchcalib.__all__]
    metrics = {cls.__name__ for cls in public if isinstance(cls, type) and issubclass(cls, StreamingMetric)}
    assert len(metrics) == 15
    assert metrics <= named

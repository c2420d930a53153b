"""Every snippet of the README runs; snippets.py says how."""

import re
import shlex
from functools import partial

import pytest
import torch
from helpers.snippets import ROOT, Snippet, run_line, run_shell, snippets

import torchcalib
from torchcalib.streaming import StreamingMetric

# of Lightning: what it thinks of a tiny data set, and a name of torch that it still uses
LIGHTNING = ("ignore:The '.*_dataloader' does not have many workers", "ignore:.*isinstance.treespec, LeafSpec.*")
pytestmark = [pytest.mark.filterwarnings(ignored) for ignored in LIGHTNING]

TEXT = (ROOT / "README.md").read_text()
ALL = snippets(ROOT / "README.md")
SCRIPTS = [snippet for snippet in ALL if snippet.script]


LONG = re.compile("torchrun|lightning|transformers|optimizer")  # processes, frameworks, trainings
NUMBER = re.compile(r"-?\d+\.\d+")


def marked(snippet):
    return pytest.param(snippet, id=str(snippet), marks=[pytest.mark.extended] if LONG.search(snippet.text) else [])


@pytest.mark.parametrize("snippet", [marked(snippet) for snippet in ALL])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # of transformers without a GPU
def test_snippet_runs(snippet, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if snippet.language == "sh":
        run_shell(snippet, tmp_path, SCRIPTS)
        return
    assert snippet.language == "python", "no test knows how to run it"
    if snippet.script:
        name, command = snippet.script
        (tmp_path / name).write_text(snippet.text)
        run_line(*[shlex.split(command)] * 2, tmp_path)
        by_many = capsys.readouterr().out.strip()
        # As many processes as there are print what one prints.
        for variable, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}.items():
            monkeypatch.setenv(variable, str(value))
    batches = [(torch.randn(4, 10), torch.randint(0, 10, (4,))) for _ in range(2)]
    exec(compile(snippet.text, "README.md", "exec"), {"torchcalib": torchcalib, "batches": batches})
    said = capsys.readouterr().out
    assert said
    if snippet.script:
        assert NUMBER.sub("", said.strip()) == NUMBER.sub("", by_many)
        # Batches of other rows round float32 logits differently, so the last of 6 printed digits may differ by 1.
        numbers = [[float(number) for number in NUMBER.findall(text)] for text in (said, by_many)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1.5e-6)


@pytest.mark.parametrize(
    "line",
    [
        "torchcalib report none.npz --n-bins 0",
        "torchcalib report a.npz --no-such-option",
        "pip install '.[none]'",
        "pip install numpy",
        "make none",
        "ls",
    ],
)
def test_a_shell_line_that_has_rotted_fails(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, SystemExit)):
        run_shell(Snippet("sh", line), tmp_path)


def test_files_of_every_kind_are_made_for_shell_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    report = partial(str.format, "torchcalib report {} --no-intervals --no-calibration")
    named = ["a.npz", "a.pt", "a.safetensors", "a.csv", "b/*.parquet", "logits.npy targets.npy --task multiclass"]
    run_shell(Snippet("sh", "\n".join(map(report, named))), tmp_path)
    assert capsys.readouterr().out.count("ECE") >= len(named)
    assert len(list(tmp_path.glob("b/*"))) == 2


def test_there_are_snippets_and_every_metric_is_in_the_table():
    assert len(ALL) >= 10
    assert len(SCRIPTS) >= 1
    assert TEXT.count("```") == 2 * len(ALL), "a block without a language"
    named = set(re.findall(r"`([A-Z]\w+)`", " ".join(line for line in TEXT.splitlines() if line.startswith("| `"))))
    public = [getattr(torchcalib, name) for name in torchcalib.__all__]
    metrics = {cls.__name__ for cls in public if isinstance(cls, type) and issubclass(cls, StreamingMetric)}
    assert len(metrics) == 25
    assert metrics <= named

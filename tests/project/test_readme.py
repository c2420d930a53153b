"""Every snippet of the README runs. Its language and first line determine how.

- Python is executed. A snippet whose first line is `# name.py: torchrun ...` is a script: it is written to `name.py`
  and run by that command.
- In a shell snippet `torchcalib`, `torchrun` and `python -m` are run on generated prediction files. The extras of
  `pip install` and the targets of `make` must exist. Any other line raises an error, because no test covers it.
"""

import re
import shlex
import tomllib
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.prediction_files import WRITERS
from processes import ROOT, run_python

import torchcalib
from torchcalib.cli import main
from torchcalib.metrics.base import CalibrationMetric

# warnings of Lightning: about worker processes for a tiny data set, and about a deprecated name of torch
LIGHTNING = ("ignore:The '.*_dataloader' does not have many workers", "ignore:.*isinstance.treespec, LeafSpec.*")
pytestmark = [pytest.mark.filterwarnings(ignored) for ignored in LIGHTNING]

TEXT = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
SCRIPT = re.compile(r"# (\w+\.py): (torchrun .+)\n")
LONG = re.compile("torchrun|lightning|transformers|optimizer")  # snippets with processes, frameworks or training
NUMBER = re.compile(r"-?\d+\.\d+")
OUTPUTS = ("--out", "--save")  # prefixes of options for output paths


def run_shell(text):
    """Run every line of a shell snippet in the working directory."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            run_line(words, shlex.split(line, comments=True, posix=False))


def run_line(words, as_written):
    """Run one command, or check its names."""
    command, *arguments = words
    if words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for name in arguments[1:]:
            found = re.fullmatch(r"(?:\.|torchcalib)(?:\[([\w,-]+)\])?", name)
            assert found, f"{name} is not this package"
            assert set(filter(None, (found[1] or "").split(","))) <= set(extras), name
    elif command == "make":
        targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert set(arguments) <= set(targets), words
    elif command in ("torchcalib", "torchrun") or words[:2] == ["python", "-m"]:
        make_inputs(arguments)
        is_quoted = [word[0] in "'\"" for word in as_written[1:]]
        arguments = [part for word, quoted in zip(arguments, is_quoted, strict=True) for part in expanded(word, quoted)]
        run_command(command, arguments)
        for option, name in pairwise(arguments):
            if option.startswith(OUTPUTS):
                path = Path(name)
                assert list(path.iterdir()) if path.is_dir() else path.stat().st_size, f"nothing in {name}"
    else:
        raise AssertionError(f"no test knows how to run `{shlex.join(words)}`")


def make_inputs(arguments):
    """Write the prediction files in the arguments that do not exist; two files for a pattern."""
    for before, word in pairwise(("", *arguments)):
        word = word.rpartition("=")[2]  # the file of NAME=FILE
        suffix = word.rpartition(".")[2]
        if suffix in (*WRITERS, "npy") and not before.startswith(OUTPUTS) and not list(Path().glob(word)):
            for name in {word.replace("*", digit) for digit in "01"}:
                make_predictions(Path(name), suffix)


def make_predictions(path, suffix):
    """Write a few predictions. Logits depend on the file name, targets do not."""
    logits = torch.randn(60, 3, generator=torch.Generator().manual_seed(zlib.crc32(path.name.encode()))).numpy()
    targets = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(0)).numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    if suffix == "npy":
        np.save(path, targets if re.search("target|label", path.name) else logits)
    elif path.stem == "answers":
        WRITERS[suffix](path, {"confidence": logits[:, 0] % 1, "correct": targets % 2})
    elif path.stem == "models":
        WRITERS[suffix](path, {"prob_resnet": logits[:, 0] % 1, "prob_vit": logits[:, 1] % 1, "target": targets % 2})
    elif suffix in ("csv", "parquet"):
        probs = torch.from_numpy(logits).softmax(-1).numpy()
        WRITERS[suffix.replace("parquet", "numbered.parquet")](path, {"prob": probs, "target": targets})
    else:
        WRITERS[suffix](path, {"logits": logits, "targets": targets})


def expanded(word, is_quoted):
    """Return the files that match a pattern, like a shell."""
    return (sorted(map(str, Path().glob(word))) if "*" in word and not is_quoted else []) or [word]


def run_command(command, arguments):
    if command == "torchcalib":
        assert main(arguments) == 0, arguments
        return
    if command == "torchrun":  # --standalone selects a free port
        arguments = ["-m", "torch.distributed.run", "--standalone", *arguments]
    done = run_python(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("language", "text"),
    [
        pytest.param(*snippet, id=f"{snippet[0]}-{k}", marks=[pytest.mark.extended] if LONG.search(snippet[1]) else [])
        for k, snippet in enumerate(SNIPPETS)
    ],
)
# raised by transformers without a GPU
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_snippet_runs(language, text, folder, monkeypatch, capsys):
    for _, script in SNIPPETS:
        if found := SCRIPT.match(script):
            (folder / found[1]).write_text(script)
    if language == "sh":
        run_shell(text)
        return
    assert language == "python", "unknown language"
    if script := SCRIPT.match(text):
        run_shell(script[2])
        by_many = capsys.readouterr().out.strip()
        # One process must print the same as several.
        for variable, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}.items():
            monkeypatch.setenv(variable, str(value))
    batches = [(torch.randn(4, 10), torch.randint(0, 10, (4,))) for _ in range(2)]
    exec(compile(text, "README.md", "exec"), {"torchcalib": torchcalib, "batches": batches})
    output = capsys.readouterr().out.strip()
    assert output
    if script:
        assert NUMBER.sub("", output) == NUMBER.sub("", by_many)
        # Batches of different sizes round float32 logits differently, so the last of 6 printed digits may differ by 1.
        numbers = [[float(number) for number in NUMBER.findall(printed)] for printed in (output, by_many)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1.5e-6)


def test_wrong_shell_lines_fail_and_input_files_of_every_format_are_generated(folder, capsys):
    for line in (
        *("torchcalib report none.npz --n-bins 0", "torchcalib report a.npz --no-such-option"),
        *("pip install '.[none]'", "pip install numpy", "make none", "ls"),
    ):
        with pytest.raises((AssertionError, SystemExit)):
            run_shell(line)
    named = ["a.npz", "a.pt", "a.safetensors", "a.csv", "b/*.parquet", "logits.npy targets.npy --task multiclass"]
    run_shell("\n".join(f"torchcalib report {files} --no-intervals --no-calibration" for files in named))
    assert capsys.readouterr().out.count("ECE") >= len(named)
    assert len(list(folder.glob("b/*"))) == 2


def test_readme_has_snippets_and_lists_every_metric():
    assert len(SNIPPETS) >= 10
    assert any(SCRIPT.match(text) for _, text in SNIPPETS)
    assert TEXT.count("```") == 2 * len(SNIPPETS), "a block without a language"
    named = set(re.findall(r"`([A-Z]\w+)`", " ".join(line for line in TEXT.splitlines() if line.startswith("| `"))))
    public = [getattr(torchcalib, name) for name in torchcalib.__all__]
    metrics = {cls.__name__ for cls in public if isinstance(cls, type) and issubclass(cls, CalibrationMetric)}
    assert metrics
    assert metrics <= named

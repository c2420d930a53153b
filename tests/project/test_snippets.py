"""Code blocks of README.md and of the pages in docs/ run. Their language and first line determine how.

- The Python blocks of a page run in order, in one namespace and one temporary folder. Those of the README run alone.
  A `text` block directly below a Python block must contain what it prints; `...` stands for any text.
- A Python block whose first line is `# name.py` or `# name.py: torchrun ...` is a script. It is written to `name.py`
  and run as the main program, and by that command.
- In a shell block `torchcalib`, `torchrun` and `python` are run on generated prediction files. The extras of
  `pip install` and the targets of `make` must exist. Any other line raises an error, because no test covers it.
"""

import re
import shlex
import sys
import tomllib
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.prediction_files import WRITERS
from processes import ROOT, run_python

from torchcalib.cli import main

GENERATED = ("_build", "_templates", "examples", "metrics", "objects", "topics")  # folders in docs/
INCLUDED = (str(Path("docs/contributing.md")),)  # a page without text of its own
SOURCES = [path.relative_to(ROOT) for path in sorted((ROOT / "docs").rglob("*.md"))]
OWN_TEXT = [str(path) for path in SOURCES if set(path.parts).isdisjoint(GENERATED) and str(path) not in INCLUDED]
PAGES = ["README.md", *OWN_TEXT]
ELSEWHERE = {str(Path("docs/guide/engines.md"))}  # run by tests/engines
SITE = re.compile(r"https://torchcalib\.readthedocs\.io/(?:en/\w+/)?(.*?)(?:#.*)?")
HOSTS = r"github\.com/torchcalib/torchcalib/(?:blob|tree|raw)|raw\.githubusercontent\.com/torchcalib/torchcalib"
REPOSITORY = re.compile(rf"https://(?:{HOSTS})/main/([^#]*)(?:#.*)?")
OWN = ("git clone https://github.com/torchcalib/torchcalib", "cd torchcalib")  # how to make a checkout
SCRIPT = re.compile(r"# (\w+\.py)(?:: (torchrun .+))?\n")
# Pages with processes, frameworks, commands, training or many random samples take seconds.
FRAMEWORKS = "evidently|ignite|lightning|mlflow|monai|transformers|wandb"
OPTIONAL = {*FRAMEWORKS.split("|"), "matplotlib", "pandas", "sklearn"}  # packages of extras
SLOW = {f"docs/{name}.md" for name in ("guide/noise_floor", "guide/notions", "contributing/upstream", "start/sklearn")}
EXTENDED = re.compile(rf"torchrun|(?:import|from) (?:{FRAMEWORKS})|^ *torchcalib |optimizer\.step", flags=re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
OUTPUTS = ("--out", "--save")  # prefixes of options for output paths


@dataclass(frozen=True)
class Block:
    """A block between fences: its language, its text, the number of lines above, and the output shown below."""

    language: str
    text: str
    line: int
    shown: str | None = None

    @property
    def script(self):
        return self.language == "python" and SCRIPT.match(self.text)


def blocks_of(text, above=0):
    """Return the blocks of a page, also those in directives such as tabs."""
    found, lines, k = [], text.splitlines(), 0
    while k < len(lines):
        opened = re.match(r"^( *)(`{3,}|~{3,})\s*(.*?)\s*$", lines[k])
        k += 1
        if not opened:
            continue
        start, (indent, fence, info) = k, opened.groups()
        while k < len(lines) and not re.match(rf"^ *{fence[0]}{{{len(fence)},}}\s*$", lines[k]):
            k += 1
        assert k < len(lines), f"the block in line {above + start} has no end"
        inner = "\n".join(line.removeprefix(indent) for line in lines[start:k]) + "\n"
        k += 1
        if info.startswith("{"):
            if not info.startswith("{math}"):
                found += blocks_of(inner, above + start)
            continue
        previous = found[-1] if found else None
        between = "".join(lines[previous.line + previous.text.count("\n") + 1 - above : start - 1]) if previous else "-"
        if info == "text" and previous and previous.language == "python" and not between.strip():
            found[-1] = Block("python", previous.text, previous.line, inner)
        else:
            found.append(Block(info, inner, above + start))
    return found


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


def is_slow(name):
    return Path(name).as_posix() in SLOW or EXTENDED.search(page(name)) is not None


def run_shell(text):
    """Run every line of a shell block in the working directory."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            run_line(words, shlex.split(line, comments=True, posix=False))


def run_line(words, as_written):
    """Run one command, or check its names."""
    command, *arguments = words
    if words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"]
        known = {re.split(r"[\[<>=;]", name)[0] for name in sum(extras.values(), project["dependencies"])}
        for name in arguments[1:]:
            if found := re.fullmatch(r"(?:\.|torchcalib)(?:\[([\w,-]+)\])?", name):
                assert set(filter(None, (found[1] or "").split(","))) <= set(extras), name
            else:
                assert name in known | {"--editable", "--upgrade", "-e", "-U"}, f"{name} is no dependency"
    elif command == "make":
        targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert {name for name in arguments if "=" not in name} <= set(targets), words
    elif command in ("torchcalib", "torchrun", "python"):
        make_inputs(arguments)
        is_quoted = [word[0] in "'\"" for word in as_written[1:]]
        arguments = [part for word, quoted in zip(arguments, is_quoted, strict=True) for part in expanded(word, quoted)]
        run_command(command, arguments)
        for option, name in pairwise(arguments):
            if option.startswith(OUTPUTS):
                path = Path(name)
                assert list(path.iterdir()) if path.is_dir() else path.stat().st_size, f"nothing in {name}"
    else:
        assert shlex.join(words) in OWN, f"no test knows how to run `{shlex.join(words)}`"


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
    if command == "torchcalib" or arguments[:2] == ["-m", "torchcalib"]:
        try:
            code = main(arguments[2 * (command == "python") :])
        except SystemExit as stopped:  # --help
            code = stopped.code
        assert not code or (arguments[0] in ("check", "watch") and code == 1), arguments
        return
    if command == "torchrun":  # --standalone selects a free port
        arguments = ["-m", "torch.distributed.run", "--standalone", *arguments]
    done = run_python(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def run_page(name, folder, monkeypatch, capsys):
    """Run all blocks of a page in a folder."""
    monkeypatch.delenv("TORCHCALIB_NUMBA", raising=False)  # pages show the default
    namespace, found = {"__name__": "__main__"}, blocks_of(page(name))
    for block in found:
        if block.script:
            (folder / block.script[1]).write_text(block.text)
    for block in found:
        capsys.readouterr()
        if block.language == "sh":
            run_shell(block.text)
        elif block.language == "python":
            code = compile("\n" * block.line + block.text, str(ROOT / name), "exec")
            if block.script:
                run_script(block.script[2], code, monkeypatch, capsys)
            else:
                exec(code, {"__name__": "__main__"} if name == "README.md" else namespace)
            if block.shown is not None:
                assert_agrees(capsys.readouterr().out, block.shown, f"{name}:{block.line}")


def run_script(command, code, monkeypatch, capsys):
    """Run a script as the main program, and by its command. One process must print the same as several."""
    if not command:
        exec(code, {"__name__": "__main__"})
        return
    run_shell(command)
    by_many = capsys.readouterr().out
    with monkeypatch.context() as patch:
        for variable, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}.items():
            patch.setenv(variable, str(value))
        exec(code, {"__name__": "__main__"})
    by_one = capsys.readouterr().out
    assert by_one.strip()
    # Batches of different sizes round float32 logits differently, so the last of 6 printed digits may differ by 1.
    assert_agrees(by_one, by_many, command, atol=1.5e-6, rtol=0)
    print(by_one)


def assert_agrees(printed, shown, where, atol=0.0, rtol=0.02):
    """Compare two outputs: words must be equal, numbers close. `...` in the second one is any text."""
    printed, shown = (" ".join(text.split()) for text in (printed, shown))
    pattern = "(?:.*)".join(re.escape(NUMBER.sub("0.0", part.strip())) for part in shown.split("..."))
    pattern = pattern.replace(r"\ ", r"\s*")
    assert re.fullmatch(rf"\s*{pattern}\s*", NUMBER.sub("0.0", printed)), f"{where} prints\n{printed}"
    if "..." not in shown:
        numbers = [[float(number) for number in NUMBER.findall(text)] for text in (printed, shown)]
        assert numbers[0] == pytest.approx(numbers[1], abs=atol, rel=rtol), where


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run each test in a temporary folder, from which scripts and modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("WANDB_MODE", "offline")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.extended] * (name != "README.md" and is_slow(name)))
        for name in PAGES
        if name not in ELSEWHERE
    ],
)
# Lightning warns about worker processes for tiny data and a deprecated name of torch, transformers about a missing GPU.
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_blocks_of_a_page_run(name, folder, monkeypatch, capsys):
    for package in set(re.findall(r"^(?:import|from) (\w+)", page(name), re.MULTILINE)) & OPTIONAL:
        pytest.importorskip(package)
    torch.manual_seed(0)
    modules = set(sys.modules)
    run_page(name, folder, monkeypatch, capsys)
    for added in set(sys.modules) - modules:  # modules of the page, which other pages may name alike
        if str(getattr(sys.modules[added], "__file__", None) or "").startswith(str(folder)):
            del sys.modules[added]
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_a_page_has_a_language(name):
    known = {"bibtex", "json", "python", "sh", "text", "toml", "yaml"}
    wrong = {block.line: block.language for block in blocks_of(page(name)) if block.language not in known}
    assert not wrong, f"{name}: language by line {wrong}"
    hidden = re.findall(r"[`:]{3,}\{(?:code-block|code|testcode|doctest|sourcecode)\}", page(name))
    assert not hidden, f"{name}: {hidden} would not be executed"


def test_blocks_are_found_in_directives_and_with_the_output_below():
    text = "````{tab-item} A\n```python\nprint(1.5)\n```\n\n```text\n1.5\n```\n````\n\n```sh\nls\n```\n"
    assert blocks_of(text) == [Block("python", "print(1.5)\n", 2, "1.5\n"), Block("sh", "ls\n", 11)]


def test_outputs_that_differ_are_found():
    assert_agrees("ECE 0.1234  of 5\n", "ECE 0.1235 of 5", "here")
    assert_agrees("a 1.0\nb 2.0\nc 3.0\n", "a 1.0\n...\nc 3.0", "here")
    for printed, shown in (("ECE 0.12", "ECE 0.13"), ("ECE 0.12 of 5", "ECE 0.12 of 6"), ("a b", "a"), ("a", "a b")):
        with pytest.raises(AssertionError):
            assert_agrees(printed, shown, "here")


def test_wrong_shell_lines_fail_and_input_files_of_every_format_are_generated(folder, capsys):
    for line in (
        *("torchcalib report none.npz --n-bins 0", "torchcalib report a.npz --no-such-option"),
        *("pip install '.[none]'", "pip install no-dependency", "make none", "ls"),
    ):
        with pytest.raises((AssertionError, SystemExit)):
            run_shell(line)
    named = ["a.npz", "a.pt", "a.safetensors", "a.csv", "b/*.parquet", "logits.npy targets.npy --task multiclass"]
    run_shell("\n".join(f"torchcalib report {files} --no-intervals --no-calibration" for files in named))
    assert capsys.readouterr().out.count("ECE") >= len(named)
    assert len(list(folder.glob("b/*"))) == 2


def test_readme_is_short_and_its_links_resolve():
    text = page("README.md")
    assert len(text.encode()) <= 8_000
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"", text)
    missing = [target for target in map("".join, targets) if not target_exists(target)]
    assert not missing


def test_links_of_the_index_for_language_models_resolve():
    targets = re.findall(r"\]\(([^)\s]+)\)", page("docs/llms.txt"))
    assert len(targets) >= 20
    assert not [target for target in targets if not target_exists(target)]


def target_exists(target):
    """Return whether a link leads to a file of the checkout, to a page of the site, or elsewhere by https."""
    if found := SITE.fullmatch(target):
        source = re.sub(r"(?<=/)$", "index.html", "/" + found[1])[1:]
        is_generated = not set(source.split("/")).isdisjoint((*GENERATED, "genindex.html", "search.html"))
        return is_generated or (ROOT / "docs" / source).with_suffix(".md").is_file()
    path = REPOSITORY.fullmatch(target)
    if not path and "://" in target:
        return target.startswith("https://")
    return target.startswith("#") or (ROOT / (path[1] if path else target.partition("#")[0])).exists()

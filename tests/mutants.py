"""Mutation test: insert random defects into numerical modules, and list those that no test detects.

Run `make mutants`, or `python tests/mutants.py --number 30 --seed 1` for a sample. The suite first runs once under
coverage, so that each mutant is tested only with the tests that run its statement. A mutant survives if all of them
pass. Some survivors are equivalent to the original; the others lack a test.
"""

import argparse
import ast
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
MODULES = (  # numerical code; Triton kernels need a GPU
    "ops/**/*.py", "special/*.py", "core/*.py", "inference/*.py", "functional/*.py", "metrics/*.py", "losses/*.py",
    "calibration/*.py",
)  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass
class Mutant:
    """A defect: replacement text for a syntax node."""

    file: str
    line: int  # first and last line of the statement, or of the function body for defaults
    last: int
    start: int  # offset in bytes
    end: int
    before: str
    after: str
    outcome: str = ""

    def __str__(self) -> str:
        before, after = (" ".join(text.split())[:90] for text in (self.before, self.after))
        return f"{self.file}:{self.line}: {before} -> {after}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def changed(node: ast.AST, lines: range, after: str) -> Mutant:
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = source[start:end].decode()
        return Mutant(str(path.relative_to(ROOT)), lines[0], lines[-1], start, end, before, after)

    def walk(node: ast.AST, lines: range) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr | ast.Raise):  # error messages are not mutated
            return
        lines = lines_of(node) if isinstance(node, ast.stmt) else lines
        after = mutated(node)
        if after is not None:
            yield changed(node, lines, after)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, lines)

    yield from walk(ast.parse(source), range(1, 2))


def lines_of(statement: ast.stmt) -> range:
    """Return the lines of a statement without its body. For a function, return the lines of its body."""
    if isinstance(statement, ast.FunctionDef):
        return range(statement.body[0].lineno, statement.end_lineno + 1)
    body = getattr(statement, "body", None)
    return range(statement.lineno, body[0].lineno if body else statement.end_lineno + 1)


def mutated(node: ast.AST) -> str | None:
    """Return the replacement text of a node, or None."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return f"({ast.unparse(ast.BinOp(left, OPERATORS[type(op)](), right))})"
        case ast.Compare(left, [op], right) if type(op) in OPERATORS:
            return f"({ast.unparse(ast.Compare(left, [OPERATORS[type(op)]()], right))})"
        case ast.BoolOp(op, values):
            return f"({ast.unparse(ast.BoolOp(OPERATORS[type(op)](), values))})"
        case ast.UnaryOp(ast.USub() | ast.Not() | ast.Invert(), operand):
            return f"({ast.unparse(operand)})"
        case ast.Constant(bool() as value):
            return str(not value)
        case ast.Constant(int() as value):
            return str(value + 1)
        case ast.Constant(float() as value):
            return repr(2 * value if value else 0.5)
        case ast.AugAssign():
            return "pass"
        case ast.Expr(ast.Call()):
            return "pass"
        case ast.Assign([ast.Name(name)], value) if any(getattr(x, "id", "") == name for x in ast.walk(value)):
            return "pass"  # a step of a computation: `x = x.clamp(0)`
        case ast.Assign([ast.Subscript()]):
            return "pass"
    return None


def selected(mutant: Mutant, data: CoverageData) -> list[str]:
    """Return the tests to run for a mutant, tests of its own folder first.

    Coverage does not measure loops compiled by numba and processes started by tests. For statements that run only
    there, the tests of the folder and of tests/contract are used. If a statement runs in the set-up of a shared
    fixture, the whole test file is used.
    """
    by_line = data.contexts_by_lineno(mutant.file)
    contexts = {name for line in range(mutant.line, mutant.last + 1) for name in by_line.get(line, []) if name}
    chosen = {context.rpartition("|")[0] for context in contexts if context.endswith("|run")}
    chosen |= {context.partition("::")[0] for context in contexts if not context.endswith("|run")}
    folder = mutant.file.split("/")[1].removesuffix(".py")
    if not chosen:
        own = (f"tests/{folder}", f"tests/test_{folder}.py", "tests/contract")
        chosen = {path for path in own if (ROOT / path).exists()}
    whole = {name for name in chosen if "::" not in name}
    chosen = whole | {name for name in chosen if name.partition("::")[0] not in whole}
    return sorted(chosen, key=lambda name: (f"/{folder}/" not in name, "contract" not in name, name))


def run_tests(tree: Path, arguments: list[str], timeout: float, **variables: str) -> tuple[int, str]:
    """Run pytest in a copy of the project, and return its exit code and output. A timeout counts as a failure."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, "timeout"
    return done.returncode, done.stdout + done.stderr


def is_compiled(path: Path) -> bool:
    """Return whether numba compiles functions of a module."""
    imports = re.compile(rf"^from \S*\b{path.parent.name}\b.*\b{path.stem}\b", re.MULTILINE)
    return "numba" in path.stem or any(imports.search(other.read_text()) for other in path.parent.glob("numba*.py"))


def try_mutant(mutant: Mutant, tree: Path, tests: list[str], timeout: float) -> None:
    """Insert a mutant into a tree, run the tests, and set the outcome of the mutant."""
    path = tree / mutant.file
    original, times = path.read_bytes(), (path.stat().st_atime, path.stat().st_mtime)
    path.write_bytes(original[: mutant.start] + mutant.after.encode() + original[mutant.end :])
    with TemporaryDirectory() as folder:
        variables = {"PYTHONDONTWRITEBYTECODE": "1"}
        if is_compiled(path):  # cached kernels contain compiled copies of the functions that they call
            variables["NUMBA_CACHE_DIR"] = folder
        listed = Path(folder) / "tests"
        listed.write_text("\n".join(tests))
        try:
            code, output = run_tests(tree, ["-x", f"@{listed}"], timeout, **variables)
        finally:
            path.write_bytes(original)
            os.utime(path, times)
    if code in (4, 5) and "ImportError while loading conftest" not in output:
        raise RuntimeError(f"pytest found no tests for {mutant}:\n{output[-2000:]}")
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    mutant.outcome = "survived" if code == 0 else f"killed by {first[1] if first else output.strip()[-60:]}"


def copy_tree(target: Path) -> Path:
    """Copy the files tracked by git, and the kernels that numba has compiled from them."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    compiled = [str(path.relative_to(ROOT)) for path in ROOT.glob("torchcalib/**/__pycache__/*.nb?")]
    for name in names + compiled:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    return target


def measure_coverage(tree: Path, path: Path) -> None:
    """Run the suite under coverage, with tests as contexts, and write the result to `path`."""
    options = ["--numprocesses", "2", "--cov", "--cov-context=test", "--cov-report="]
    code, output = run_tests(tree, options, 3600, COVERAGE_FILE=str(path))
    if code:
        raise RuntimeError(f"the tests must pass without a mutant:\n{output[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=150, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each mutant")
    parser.add_argument("--out", type=Path, help="JSON file for the outcomes")
    parser.add_argument("--coverage", type=Path, help="file for the coverage; an existing one is reused")
    given = parser.parse_args()
    os.environ.setdefault("TORCHCALIB_DATA", str(ROOT.parent / "shared" / "data"))
    files = sorted({path for pattern in MODULES for path in (ROOT / "torchcalib").glob(pattern)})
    every = [mutant for path in files if "triton" not in path.name for mutant in mutants_of(path)]
    mutants = random.Random(given.seed).sample(every, given.number)
    print(f"{len(mutants)} of {len(every)} mutants in {len(files)} files")
    with TemporaryDirectory() as folder, ThreadPoolExecutor(given.workers) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for k in range(given.workers):
            trees.put(copy_tree(Path(folder) / str(k)))
        path = (given.coverage or Path(folder) / ".coverage").absolute()
        if not path.exists():
            measure_coverage(Path(folder) / "0", path)
        data = CoverageData(path)
        data.read()

        def work(mutant: Mutant) -> None:
            tree = trees.get()
            try:
                try_mutant(mutant, tree, selected(mutant, data), given.timeout)
            finally:
                trees.put(tree)
            print(mutant.outcome, mutant, sep="\t", flush=True)
            if given.out:
                given.out.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1))

        list(pool.map(work, mutants))
    print(dict(Counter(mutant.outcome.partition(" ")[0] for mutant in mutants)))
    for mutant in mutants:
        if mutant.outcome == "survived":
            print("survived:", mutant)


if __name__ == "__main__":
    main()

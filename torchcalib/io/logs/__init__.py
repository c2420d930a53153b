"""Readers of logs of evaluations of language models, recognised by their content."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torchcalib.io.confidences import CONFIDENCES
from torchcalib.io.errors import InputError, quoted, reading
from torchcalib.io.logs.answer_lines import Decisions, Judged, Responses
from torchcalib.io.logs.answers import START, Log, LogOptions, rows_in
from torchcalib.io.logs.blocks import Answer
from torchcalib.io.logs.fields import id_of, looked_for, roles_of
from torchcalib.io.logs.helm import Helm
from torchcalib.io.logs.inspect_ai import Inspect
from torchcalib.io.logs.lighteval import LightEval
from torchcalib.io.logs.lm_eval import LmEval
from torchcalib.io.logs.objects import RowObjects, members_of, whole_file
from torchcalib.io.logs.olmes import Olmes
from torchcalib.io.names import key_of

LOGS: tuple[type[Log], ...] = (LmEval, Inspect, Helm, Judged, Olmes, LightEval, Responses, Decisions)
"""Readers in the order in which they are tried."""

_TASKS = ("samples_*.jsonl", "samples_*.jsonl.gz", "task-*-predictions.jsonl", "details_*.parquet")
"""Names of files with the answers to one task, which are pooled."""
_TASK = re.compile(
    r"(?:samples_|task-\d+-|details_)(.+?)(?:-predictions)?(?:_\d{4}-\d\d-\d\dT[\d:.-]+)?\.(?:jsonl(?:\.gz)?|parquet)"
)
_BINARY = (".pkl", ".pickle", ".joblib", ".pt", ".pth", ".npz", ".npy", ".safetensors", ".xlsx", ".xls", ".zip")

__all__ = ["CONFIDENCES", "LOGS", "Answer", "Log", "LogOptions", "golds_of", "named_fields", "open_log", "task_of"]


def open_log(source: Any, chosen: str | None = None, words: Mapping[str, float] | None = None, **options: Any) -> Log:
    """Open a log: a file, a folder or a list of files with one or several tasks, or rows in memory.

    Args:
        source: `.jsonl`, `.jsonl.gz`, `.eval`, `.json`, `.csv`, `.tsv` or `.parquet` file, a pattern for several, a
            folder, a list of paths, a DataFrame, or a list of dicts or other collection of them that can be read twice.
        chosen: the filter (lm-eval) or scorer (Inspect) whose answers are read; None for the first in the file.
        words: confidences in [0, 1] for words such as "high".
        **options: further fields of `LogOptions`.

    Returns:
        The log. Only its first rows were read.

    Raises:
        InputError: if the file is missing, damaged or of another kind.
    """
    how = LogOptions(chosen, words or {}, **options)
    if isinstance(source, str | Path) or _are_paths(source):
        files = _files_of(source)
        for file in files:
            _check_file(file)
        if len(files) > 1:
            return _pooled(source, files, how)
        return _opened(files[0], RowObjects(files[0]), how)
    if isinstance(source, Iterator) or not hasattr(source, "__iter__"):
        raise InputError(
            f"`log` must be a path, a DataFrame or a list of dicts, got {type(source).__name__}. Pass one."
        )
    given = RowObjects(source)
    return _opened(Path(given.kind), given, how)


def named_fields(**arguments: str | None) -> dict[str, str]:
    """Return the fields by role that the arguments of `audit` name. A definition in `CONFIDENCES` is no field."""
    named = {role: field for role, field in arguments.items() if field is not None}
    return {role: field for role, field in named.items() if role != "confidence" or field not in CONFIDENCES}


def golds_of(source: Any, names: Mapping[str, str]) -> Mapping[str, Any]:
    """Return right answers by question, from a dict, a file or rows with a name of the question and the right answer.

    Raises:
        InputError: if the fields are not found, or if a question has two right answers.
    """
    if isinstance(source, Mapping):
        return {id_of(name): gold for name, gold in source.items()}
    label = str(source) if isinstance(source, str | Path) else type(source).__name__
    with reading(label, "table"):
        if isinstance(source, str | Path):
            _check_file(source := Path(source))
        rows = list(rows_in(RowObjects(source).groups(START)))
        known = {key_of(name) for row in rows[:START] for name in row}
        roles = roles_of(
            rows[:START],
            {role: x for role, x in names.items() if role in ("target", "id") and key_of(x) in known},
            label,
        )
        if roles.target is None or roles.id is None:
            raise InputError(
                f"`gold` must have the question and the right answer in each row, such as `id` and `gold`, got the "
                f"fields {quoted(roles.found, 20)}. Pass id='NAME' and target='NAME'."
            )
        found: dict[str, Any] = {}
        for row in rows:
            sets = [str(row[each]) for each in roles.data_sets if row.get(each) is not None]
            name = "/".join([*sets, id_of(row.get(roles.id))])
            gold = row.get(roles.target)
            if name in found and found[name] != gold:
                raise InputError(
                    f"`gold` must have one right answer for each question, got two for `{name}`. Add the data set as "
                    "a field `dataset`."
                )
            found[name] = gold
    return found


def task_of(path: Path) -> str | None:
    """Return the task of a file, whose name contains it; None for other names."""
    match = _TASK.fullmatch(path.name)
    return None if match is None else match[1]


def _opened(path: Path, rows: RowObjects, options: LogOptions) -> Log:
    """Return the log of the kind that its first object has."""
    with reading(str(path), "log"):
        if path.suffix.lower() == ".eval":
            objects: Iterator[Mapping[str, Any]] = (header for _, header in members_of(path, "header.json".__eq__))
        elif path.suffix.lower() == ".json" and (whole := _whole_log(path)) is not None:
            objects = iter([whole])
        else:
            objects = rows_in(rows.groups(START))
        first = next(objects, {})
        for kind in LOGS[:-1]:
            if kind.recognises(first):
                return kind(path, {"": rows}, options)
        start = [first, *islice(objects, START - 1)]
    roles = roles_of(start, options.fields, str(path), options.gold is not None)
    missing = looked_for(roles)
    if first and (not missing if options.gold is None else roles.has_confidence):
        return Decisions(path, {"": rows}, options, roles)
    kinds = ", ".join(kind.kind for kind in LOGS[:-1])
    if not first:
        raise InputError(f"`{path}` must be a log of one of these kinds: {kinds}; or contain rows, got none. Check it.")
    raise InputError(
        f"`{path}` must be a log of one of these kinds, or have {missing}; got an object with the keys "
        f"{quoted(roles.found or first)}. Kinds are {kinds}."
    )


def _whole_log(path: Path) -> Mapping[str, Any] | None:
    """Return the content of a file that is one log; None if it contains rows."""
    try:
        found = whole_file(path)
    except json.JSONDecodeError:  # lines
        return None
    return found if isinstance(found, dict) and any(kind.recognises(found) for kind in LOGS[:4]) else None


def _pooled(source: Any, files: Sequence[Path], options: LogOptions) -> Log:
    """Return the log of several tasks of one program."""
    tasks = [task_of(path) or path.stem for path in files]
    if repeated := {task for task in tasks if tasks.count(task) > 1}:
        raise InputError(
            f"`{source}` must have one file for each task, got several for {quoted(repeated)}. Name the files of one "
            "system, or compare systems with a name for each."
        )
    rows = list(map(RowObjects, files))
    logs = [_opened(path, each, options) for path, each in zip(files, rows, strict=True)]
    if len({*map(type, logs)}) > 1 or logs[0].kind not in (LmEval.kind, Olmes.kind, LightEval.kind, Decisions.kind):
        raise InputError(
            f"`{source}` must contain files of one kind, with a line or row for each answer, got "
            f"{quoted({log.kind for log in logs})}. Name a file."
        )
    folder = Path(source) if isinstance(source, str | Path) else files[0].parent
    return type(logs[0])(folder, dict(zip(tasks, rows, strict=True)), options)


def _are_paths(source: Any) -> bool:
    return isinstance(source, list | tuple) and bool(source) and all(isinstance(each, str | Path) for each in source)


def _files_of(source: Any) -> Sequence[Path]:
    """Return the files of a path, a pattern, a folder or a list of paths."""
    if not isinstance(source, str | Path):
        return [Path(each) for each in source]
    path = Path(source)
    if any(letter in path.name for letter in "*?[") and not path.exists():
        found = sorted(path.parent.glob(path.name))
        if not found:
            raise InputError(f"`{path}` must match at least one file, got none. Check the pattern and the folder.")
        return found
    if not path.is_dir():
        return [path]
    state = path / "scenario_state.json"
    found = [state] if state.is_file() else sorted({file for name in _TASKS for file in path.rglob(name)})
    if not found:
        raise InputError(
            f"`{path}` must contain `scenario_state.json` or files {quoted(_TASKS)}, got "
            f"{quoted(sorted(each.name for each in path.iterdir()))}. Name a file."
        )
    return found


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise InputError(f"`{path}` must be a file, got a path that does not exist. Check the path.")
    suffix = path.suffix.lower()
    if suffix in _BINARY:
        advice = "Pickles are never loaded. " if suffix in _BINARY[:5] else ""
        raise InputError(
            f"`{path}` must be a log or a table of answers (.jsonl, .json, .eval, .csv, .tsv, .parquet), got "
            f"`{suffix}`. {advice}Write df.to_parquet(path) or one object per line."
        )

"""Jobs for logs of language models: documents per second from JSON lines, and the parsers of their lines."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.job import Job, alternative
from benchmarks.samples import folder
from torchcalib.io.logs import objects, open_log
from torchcalib.reporting.audit import have_equal_text, read_log
from torchcalib.reporting.audit_builder import AuditOptions

_OPTIONS = AuditOptions(15, False, False, have_equal_text, None)


def answer_line(number: int, probs: list[float], right: int) -> dict[str, Any]:
    """Return an answer with a probability for each option and a confidence."""
    by_option = dict(zip("ABCD", probs, strict=True))
    chosen = max(by_option, key=by_option.__getitem__)
    confidence = round(by_option[chosen], 3)
    return {"item_id": number, "gold": "ABCD"[right], "pred": chosen, "probs": by_option, "confidence": confidence}


def lm_eval_line(number: int, probs: list[float], right: int) -> dict[str, Any]:
    """Return a sample of a multiple-choice task of lm-eval."""
    options = [" a dog in the park", " green", " one more option", " none of these"]
    responses = [[str(p - 1), "False"] for p in probs]
    return {
        "doc_id": number,
        "doc": {"question": "q"},
        "target": str(right),
        "arguments": {f"gen_args_{k}": {"arg_0": "q", "arg_1": option} for k, option in enumerate(options)},
        "resps": [[response] for response in responses],
        "filtered_resps": responses,
        "filter": "none",
        "acc": float(probs.index(max(probs)) == right),
    }


def log_of(n: int, line: Callable[[int, list[float], int], dict[str, Any]]) -> tuple[Path]:
    """Write a log of n documents."""
    rng = random.Random(0)
    path = folder() / "log.jsonl"
    with path.open("w") as file:
        for number in range(n):
            drawn = [rng.random() + 0.1 for _ in range(4)]
            probs = [each / sum(drawn) for each in drawn]
            file.write(json.dumps(line(number, probs, rng.choices(range(4), probs)[0])) + "\n")
    return (path,)


def summed(path: Path) -> int:
    """Read a log, and add its answers to the sums of all definitions."""
    return read_log(partial(open_log, path), _OPTIONS).whole.n_answers


@alternative("orjson", title="standard library's parser")
def summed_with_standard_parser(path: Path) -> int:
    """The same without orjson."""
    parser, objects.orjson = objects.orjson, None  # type: ignore[assignment]
    try:
        return summed(path)
    finally:
        objects.orjson = parser


@alternative(title="reading without sums")
def read_without_sums(path: Path) -> int:
    return sum(map(len, open_log(path).blocks(2**15)))


JOBS = [
    Job(
        f"audit of 20,000 {name}",
        partial(log_of, line=line, n=20_000),
        summed,
        {summed_with_standard_parser: None, read_without_sums: None},
        seconds=0.2,
        extra_bytes=200_000_000,
        rounds=3,
    )
    for name, line in (("answers with probabilities", answer_line), ("samples of lm-eval", lm_eval_line))
]

"""Details of LightEval and the Open LLM Leaderboard, `details_*.parquet`: a row for each document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchcalib.io.logs.answers import RowLog, add_lengths, add_stated_confidence, lengths_of, option_index
from torchcalib.io.logs.blocks import Answer
from torchcalib.io.logs.fields import LIGHTEVAL, correctness, first

Row = Mapping[str, Any]


class LightEval(RowLog):
    """Reader of details of both layouts: flat columns, or the columns `doc`, `model_response` and `metric`."""

    kind = "LightEval details"
    names = LIGHTEVAL

    @classmethod
    def recognises(cls, start: Row) -> bool:
        """Return True for the columns of one of the layouts."""
        is_flat = isinstance(start.get("predictions"), list) and bool(start.keys() & {*LIGHTEVAL["target"]})
        return is_flat or all(_part(start, name) for name in ("doc", "model_response"))

    def answers_of(self, row: Row, index: int, place: str) -> Iterable[Answer]:
        """Yield the answer to a document."""
        doc, response, metrics = _parts_of(row)
        name = first({**row, **doc}, LIGHTEVAL["id"])
        document = self.document_of(doc.get("task_name") or None, index if name is None else name)
        answer = Answer(document, content=str(first(doc, LIGHTEVAL["content"]) or ""))
        options = [str(option) for option in doc.get("choices") or ()]
        logged = _scores(first(response, LIGHTEVAL["probs"]))
        answer.correct = correctness(first(metrics, LIGHTEVAL["correct"]))
        text = response.get("text")
        if len(logged) > 1 and (not options or len(logged) == len(options)):
            scores = [self.log_prob(score, place) for score in logged]
            answer.right = tuple(_right(doc, options, len(scores)))
            if not answer.right:
                self.count_unnamed(first(doc, LIGHTEVAL["target"]), options)
            unconditional = response.get("unconditioned_logprobs")
            without = unconditional if isinstance(unconditional, list) and len(unconditional) == len(scores) else None
            add_lengths(answer, scores, lengths_of([option.strip() for option in options]), without)
        else:
            found = text if text is not None else response.get("predictions")
            answer.text = str(found[0]) if isinstance(found, list) and found else None if found is None else str(found)
            add_stated_confidence(answer)
            self.count_neither(answer)
        yield answer


def _parts_of(row: Row) -> tuple[Row, Row, Row]:
    """Return the document, the response of the model and the metrics of a row."""
    doc, response = _part(row, "doc"), _part(row, "model_response")
    metrics = _part(row, "metrics") or _part(row, "metric") or row
    return (doc, response, metrics) if doc and response else (row, row, metrics)


def _part(row: Row, name: str) -> Row:
    """Return an object of a row. In a Parquet file, its fields are columns such as `doc.query`."""
    found = row.get(name)
    if isinstance(found, Mapping):
        return found
    return {key.removeprefix(f"{name}."): value for key, value in row.items() if key.startswith(f"{name}.")}


def _scores(found: Any) -> Sequence[Any]:
    """Return the log-probability of each option, alone or with whether it is the greedy continuation."""
    if not isinstance(found, list):
        return ()
    scores = [each[0] if isinstance(each, list) and each else each for each in found]
    return [] if any(isinstance(score, str | list) for score in scores) else scores


def _right(doc: Row, options: Sequence[str], n: int) -> Iterable[int]:
    """Yield the index of each right option, from indices or texts."""
    for name in LIGHTEVAL["target"]:
        given = doc.get(name)
        several = given if isinstance(given, list) else [given]
        several = [each for each in several if each is not None]
        for each in several:
            index = each if isinstance(each, int) else option_index(str(each), options)
            if index is not None and 0 <= index < n:
                yield index
        if several:
            return

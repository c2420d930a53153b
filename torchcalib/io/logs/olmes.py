"""Predictions of OLMES (oe-eval), `task-*-predictions.jsonl`: a line for each document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchcalib.io.logs.answers import RowLog, add_lengths, add_stated_confidence
from torchcalib.io.logs.blocks import Answer
from torchcalib.io.logs.fields import OLMES, correctness, first, number_of

_LENGTHS = {"token": "num_tokens", "character": "num_chars", "byte": "num_bytes"}


class Olmes(RowLog):
    """Reader of predictions of tasks with options, and of generated answers."""

    kind = "OLMES predictions"
    names = OLMES

    @classmethod
    def recognises(cls, start: Mapping[str, Any]) -> bool:
        """Return True for the output of a model with sums of log-probabilities, also below `prediction`."""
        output = _output_of(start)
        return bool(output) and all(isinstance(each, Mapping) and OLMES["probs"][0] in each for each in output)

    def answers_of(self, row: Mapping[str, Any], index: int, place: str) -> Iterable[Answer]:
        """Yield the answer to a document."""
        output, metrics = _output_of(row), row.get("metrics") or {}
        name = first(row, OLMES["id"])
        answer = Answer(self.document_of(index if name is None else name), str(first(row, OLMES["content"])))
        scores = [self.log_prob(each[OLMES["probs"][0]], place) for each in output]
        if OLMES["response"][0] in output[0]:
            answer.correct = correctness(first(metrics, OLMES["correct"]))
            answer.text = str(output[0][OLMES["response"][0]])
            answer.confidences["raw"] = math.exp(scores[0])
            if (n := output[0].get("num_tokens")) and "num_tokens" in output[0]:
                answer.confidences["per_token"] = math.exp(scores[0] / n)
            add_stated_confidence(answer)
            self.count_neither(answer)
            yield answer
            return
        gold = number_of(first({**metrics, **_prediction_of(row), **row}, OLMES["target"]))
        if gold in range(len(output)):
            answer.right = (int(gold),)
        else:
            self.count_unnamed(gold, [str(k) for k in range(len(output))])
        lengths = {unit: _numbers(output, key) for unit, key in _LENGTHS.items()}
        add_lengths(answer, scores, lengths, _numbers(output, "sum_logits_uncond"))
        answer.correct = correctness(metrics.get("acc_raw"))
        yield answer


def _prediction_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    found = row.get("prediction")
    return found if isinstance(found, Mapping) else {}


def _output_of(row: Mapping[str, Any]) -> Sequence[Any]:
    """Return the output of the model for each option, or for the generated answer."""
    found = row.get("model_output", _prediction_of(row).get("model_output"))
    return found if isinstance(found, list) else ()


def _numbers(output: Sequence[Mapping[str, Any]], key: str) -> list[Any] | None:
    """Return a number for each option; None if one has none."""
    found = [each.get(key) for each in output]
    return None if None in found else found

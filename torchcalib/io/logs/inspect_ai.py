"""Logs of Inspect, `.eval` and `.json`: samples with epochs, scores and the output of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchcalib.io.logs.answers import (
    Log,
    add_stated_confidence,
    add_token_confidences,
    option_index,
    options_of_answer,
)
from torchcalib.io.logs.blocks import Answer
from torchcalib.io.logs.fields import INSPECT, correctness, first
from torchcalib.io.logs.objects import members_of, whole_file

_SAMPLES = re.compile(r"samples/.*\.json")


class Inspect(Log):
    """Reader of the samples of a log. Epochs are answers to the same question."""

    kind = "Inspect log"
    names = INSPECT
    stated = "reported", "stated"
    takes = ("by",)

    @classmethod
    def recognises(cls, start: Mapping[str, Any]) -> bool:
        """Return True for the keys of a log, or of its header."""
        return {"version", "status", "eval"} <= start.keys()

    def read(self) -> Iterator[Answer]:
        """Yield the scored samples."""
        for place, sample in self._samples():
            self.enter(sample)
            scores = sample.get("scores") or {}
            selected = [name for name in scores if self.selects(name)]
            if not selected:
                self.counts["sample without a score"] += 1
                continue
            score, output = scores[selected[0]], sample.get("output") or {}
            value, fields = score.get("value"), dict(score.get("metadata") or {})
            if isinstance(value, Mapping):  # several values, such as {"score": "C", "confidence": 85}
                fields |= value
                value = first(value, INSPECT["correct"])
            answer = Answer(str(sample["id"]), sample=int(sample.get("epoch", 1)), correct=correctness(value))
            answer.text = _text_of(output)
            answer.short = score.get("answer") if isinstance(score.get("answer"), str) else None
            self.count_neither(answer)
            self._add_logged(answer, sample, fields, place)
            self._add_tokens(answer, sample, output, place)
            add_stated_confidence(answer)
            yield answer

    def _samples(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if self.path.suffix.lower() == ".eval":
            yield from members_of(self.path, lambda name: bool(_SAMPLES.fullmatch(name)))
        else:
            for index, sample in enumerate(whole_file(self.path).get("samples") or (), 1):
                yield f"sample {index}", sample

    def _add_logged(self, answer: Answer, sample: Mapping[str, Any], metadata: Mapping[str, Any], place: str) -> None:
        """Add the confidences in the metadata of a score, or in its value."""
        reported = first(metadata, INSPECT["confidence"])
        if reported is not None:
            self.add_reported(answer, reported, place)
        (name,) = INSPECT["probs"]
        options = metadata.get(name)
        if isinstance(options, Mapping) and options:
            answer.probs["probabilities"] = [self.probability(p, f"`{name}` of {place}") for p in options.values()]
            answer.right = _right_of(sample, list(options))

    def _add_tokens(self, answer: Answer, sample: Mapping[str, Any], output: Mapping[str, Any], place: str) -> None:
        """Add the confidences that follow from the log-probabilities of tokens."""
        choices = output.get("choices") or [{}]
        tokens = (choices[0].get("logprobs") or {}).get("content") or []
        add_token_confidences(answer, [self.log_prob(token["logprob"], place) for token in tokens])
        if tokens and (options := sample.get("choices")) and not answer.probs:
            letters = [chr(ord("A") + k) for k in range(len(options))]
            found = options_of_answer(self, tokens, letters, answer.short, place)
            if found is not None:
                answer.probs["option_letters"] = found
                answer.right = _right_of(sample, letters)


def _text_of(output: Mapping[str, Any]) -> str | None:
    """Return the text of an answer, whose message has a text or parts."""
    if isinstance(output.get("completion"), str):
        return str(output["completion"])
    choices = output.get("choices") or [{}]
    content = (choices[0].get("message") or {}).get("content")
    if isinstance(content, list):
        content = "\n".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else None


def _right_of(sample: Mapping[str, Any], names: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of the right options. A target is a text or letter, or a list of them."""
    target = sample.get("target", "")
    wanted = target if isinstance(target, list) else [target]
    found = [option_index(str(each), names) for each in wanted]
    return tuple(index for index in found if index is not None)

"""Samples of the Language Model Evaluation Harness (lm-eval), `samples_*.jsonl`: a line per document and filter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from torchcalib.io.cells import parsed
from torchcalib.io.logs.answers import (
    MOST_LOG_PROB,
    NEITHER,
    UNNAMED,
    IrregularError,
    RowLog,
    add_lengths,
    add_stated_confidence,
    all_correctness,
    lengths_of,
    option_index,
)
from torchcalib.io.logs.blocks import NONE, Answer, AnswerColumns
from torchcalib.io.logs.fields import LM_EVAL, correctness, first
from torchcalib.io.logs.objects import RowGroup, floats_of
from torchcalib.io.logs.stated import Array

_AT_ONCE = 25  # samples whose objects are alive at the same time: the garbage collector traverses those of many
_REQUIRED = itemgetter(LM_EVAL["id"][0], "target", "arguments", "filtered_resps")
_DISAGREES = "option of greatest likelihood that disagrees with `acc`"


class _Fields(NamedTuple):
    """Fields of samples with several options. The objects that contain them are not kept."""

    documents: list[Any]
    contents: list[Any]  # empty unless they are needed
    targets: list[Any]
    outcomes: list[Any]  # `acc`, or None
    sizes: list[Any]  # numbers of options
    options: list[Any]  # texts of the options of all samples, in turn
    scores: list[Any]  # and their log-probabilities, which may be text


class LmEval(RowLog):
    """Reader of samples of `multiple_choice`, `loglikelihood` and `generate_until` tasks."""

    kind = "lm-eval samples"
    names = LM_EVAL
    at_once = 2**8  # of which most objects are not kept

    @classmethod
    def recognises(cls, start: Mapping[str, Any]) -> bool:
        """Return True for the keys of a line that lm-eval writes."""
        return {"doc_id", "arguments", "resps"} <= start.keys()

    def answers_of(self, row: Mapping[str, Any], index: int, place: str) -> Iterator[Answer]:
        """Yield the answer to a document, or one for each repetition of a generation."""
        del index
        if not self.selects(str(row.get("filter", "none"))):
            return
        document = self.document_of(row[LM_EVAL["id"][0]])
        pairs = _pairs(row["arguments"])
        if pairs[0][1] is None or isinstance(pairs[0][1], dict):
            yield from self._generations(row, document)
            return
        logged = [self.log_prob(score, place) for score in _scores(row, len(pairs))]
        # With `acc_mutual_info`, each option is requested a second time, without the question.
        asked = [k for k, (context, _) in enumerate(pairs) if context != ""] or list(range(len(pairs)))
        options, scores = [str(pairs[k][1]) for k in asked], [logged[k] for k in asked]
        if len(options) == 1:
            yield Answer(document, content=_content_of(row), correct=correctness(row.get("acc")), truth=scores[0])
            return
        answer = Answer(document, content=_content_of(row), correct=correctness(row.get("acc")))
        unasked = {str(pairs[k][1]).strip(): logged[k] for k in range(len(pairs)) if k not in {*asked}}
        without = [unasked[option.strip()] for option in options if option.strip() in unasked]
        texts = _without_delimiter(options)
        add_lengths(answer, scores, lengths_of(texts), without if len(without) == len(options) else None)
        self._add_right(answer, row, texts)
        yield answer

    def columns_of(self, group: RowGroup) -> AnswerColumns:
        """Return the answers to questions with options, all of which follow a space, or none of which does."""
        found = _Fields([], [], [], [], [], [], [])
        rows = group.rows()
        for _ in range(0, len(group.content), _AT_ONCE):
            # The objects of these rows have no name here: they are freed before the next ones are parsed
            for values, more in zip(found, self._fields_of(list(islice(rows, _AT_ONCE))), strict=True):
                values.extend(more)
        if not found.documents:
            return AnswerColumns([], *np.zeros((3, 0)))
        scores, sizes = np.array(floats_of(found.scores)), np.array(found.sizes)
        texts = list(map(str.strip, found.options))
        joined = "\n".join(found.options)  # which takes less time than operations on each
        follow_spaces = joined == " " + "\n ".join(texts)
        if not (follow_spaces or found.options == texts) or not (scores <= MOST_LOG_PROB).all():
            raise IrregularError
        scores, starts = np.minimum(scores, 0.0), np.cumsum(sizes) - sizes
        is_largest = scores == np.repeat(np.maximum.reduceat(scores, starts), sizes)
        if np.count_nonzero(is_largest) > len(sizes):  # several options of greatest likelihood
            raise IrregularError
        chosen = np.flatnonzero(is_largest) - starts
        correct = all_correctness(found.outcomes)
        right = _right_of_all(found.targets, texts, sizes, chosen, correct)
        if (right == NONE).all():
            self.unnamed = self.unnamed or (found.targets[0], texts[: sizes[0]])
        disagrees = ((chosen == right) != (correct == 1)) & (correct == correct) & (right != NONE)
        lengths = np.fromiter(map(len, texts), np.int64)
        n_bytes = lengths if joined.isascii() else np.array([len(text.encode()) for text in texts])
        per_character, per_byte = scores / np.maximum(lengths, 1), scores / np.maximum(n_bytes, 1)
        return AnswerColumns(
            self.documents_of(found.documents),
            correct,
            right,
            sizes,
            log_probs={"choices": scores, "choices_per_character": per_character, "choices_per_byte": per_byte},
            contents=found.contents,
            counts={UNNAMED: int((right == NONE).sum()), _DISAGREES: int(disagrees.sum())},
        )

    def _fields_of(self, rows: Sequence[Mapping[str, Any]]) -> _Fields:
        """Return the fields of the samples of the selected filter, which are questions with several options."""
        filters = [row.get("filter", "none") for row in rows]
        selected = {name for name in dict.fromkeys(filters) if self.selects(str(name))}
        if len(selected) < len({*filters}):
            rows = [row for row, name in zip(rows, filters, strict=True) if name in selected]
        if not rows:
            return _Fields([], [], [], [], [], [], [])
        documents, targets, requests, responses = zip(*map(_REQUIRED, rows), strict=True)
        pairs = list(chain.from_iterable(map(dict.values, requests)))
        scores = list(chain.from_iterable(responses))
        sizes = list(map(len, requests))
        is_regular = min(sizes) > 1 and sizes == list(map(len, responses)) and {*map(type, scores)} <= {list}
        if not is_regular or "" in map(itemgetter("arg_0"), pairs):
            raise IrregularError
        return _Fields(
            documents=list(documents),
            contents=list(map(_content_of, rows)) if self.with_contents else [],
            targets=list(map(str, targets)),
            outcomes=[row.get("acc") for row in rows],
            sizes=sizes,
            options=list(map(itemgetter("arg_1"), pairs)),
            scores=list(map(itemgetter(0), scores)),
        )

    def _add_right(self, answer: Answer, row: Mapping[str, Any], texts: Sequence[str]) -> None:
        """Add the right option, and count targets that name none."""
        scores = answer.log_probs["choices"]
        chosen = scores.index(max(scores))
        answer.right = _right_options(str(row[LM_EVAL["target"][0]]), texts, chosen, answer.correct)
        if not answer.right:
            self.count_unnamed(row[LM_EVAL["target"][0]], texts)
        elif not math.isnan(answer.correct) and (chosen in answer.right) != bool(answer.correct):
            self.counts[_DISAGREES] += 1

    def _generations(self, row: Mapping[str, Any], document: str) -> Iterator[Answer]:
        correct = correctness(first(row, (*LM_EVAL["correct"], *row.get("metrics", ()))))
        if math.isnan(correct):
            self.counts[NEITHER] += 1
        repeated, filtered = row["resps"][0], row.get("filtered_resps")
        selected = filtered[0] if isinstance(filtered, list) and len(filtered) == 1 else None
        for sample, response in enumerate(repeated):
            # A metric belongs to the filtered response, which is one of several repetitions or their majority.
            answer = Answer(document, _content_of(row), sample, correct if len(repeated) == 1 else math.nan)
            answer.text = str(response[0]) if isinstance(response, list) else str(response)
            if isinstance(selected, str) and len(repeated) > 1:
                answer.voted = selected, correct
            if isinstance(response, list) and len(response) > 1:
                answer.confidences["raw"] = math.exp(self.log_prob(response[1], f"document {document}"))
            add_stated_confidence(answer)
            yield answer


def _content_of(row: Mapping[str, Any]) -> str:
    """Return the hash of the document, or else the document, without which rows of several tasks would be mixed."""
    return str(first(row, LM_EVAL["content"]))


def _pairs(arguments: Any) -> list[tuple[Any, Any]]:
    """Return context and continuation, or options of a generation, of each request."""
    requests = arguments.values() if isinstance(arguments, dict) else arguments
    pairs = [
        (request["arg_0"], request.get("arg_1")) if isinstance(request, dict) else (*request, None)[:2]
        for request in requests
    ]
    if not pairs:
        raise ValueError("`arguments` must contain at least one request, got none")
    return pairs


def _scores(row: Mapping[str, Any], n: int) -> list[Any]:
    """Return the log-probability of each request."""
    responses = row.get("filtered_resps") or row["resps"]
    # Without a filter that takes the first repetition, each response is a list of repetitions.
    while responses and all(
        isinstance(response, list) and response and isinstance(response[0], list) for response in responses
    ):
        responses = [response[0] for response in responses]
    if len(responses) != n:
        raise ValueError(f"document {row['doc_id']} must have a response for each request, got {len(responses)} of {n}")
    return [response[0] if isinstance(response, list) else response for response in responses]


def _without_delimiter(options: Sequence[str]) -> list[str]:
    """Return the texts of options without the white space that precedes all of them."""
    n = min(len(option) - len(option.lstrip()) for option in options)
    shared = options[0][:n]
    return [option.removeprefix(shared) for option in options]


def _right_options(target: str, options: Sequence[str], chosen: int, logged: float) -> tuple[int, ...]:
    """Return the right options from the text of a target: an index, the text or letter of an option, or a list.

    Options may be numbers, such as 3 and 2. A target is then both an index and a text, and the option of greatest
    likelihood with the logged accuracy decides.
    """
    if target.startswith("["):
        found = [_right_options(str(one), options, chosen, math.nan) for one in parsed(target) or ()]
        return tuple(dict.fromkeys(index for each in found for index in each))
    index = int(target) if target.isdecimal() and int(target) < len(options) else None
    named = option_index(target, options)
    known = [each for each in (index, named) if each is not None]
    if logged == logged:
        known = [each for each in known if (each == chosen) == bool(logged)] or known
    return tuple(known[:1])


def _right_of_all(targets: Sequence[str], texts: Sequence[str], sizes: Array, chosen: Array, logged: Array) -> Array:
    """Return the index of the right option of several documents, or `NONE`. `texts` contains the options of all."""
    if all(map(str.isdecimal, targets)) and {*texts}.isdisjoint(targets):  # indices, and not texts of options
        right = np.array(list(map(int, targets)))
        if (right < sizes).all():
            return right
    ends = np.cumsum(sizes).tolist()
    options = [texts[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]
    found = [_right_options(*each) for each in zip(targets, options, chosen.tolist(), logged.tolist(), strict=True)]
    if max(map(len, found)) > 1:
        raise IrregularError
    return np.array([each[0] if each else NONE for each in found])

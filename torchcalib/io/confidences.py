"""Definitions of the confidences that logs contain, in words."""

from collections.abc import Mapping
from typing import NamedTuple

_OPTIONS = "each option of the question, given by the task"
_GENERATED = "the generated answer"
_PROMPT = "the prompt of the task; for each token also the earlier tokens of the scored answer"


class ConfidenceWords(NamedTuple):
    """Words for one source of confidences, for its definition card (arXiv 2605.27752 has the checklist)."""

    name: str
    formula: str
    scored: str = _OPTIONS  # the answer to which the confidence belongs
    context: str = _PROMPT  # the text on which the probability is conditioned


CONFIDENCES: Mapping[str, ConfidenceWords] = {
    "choices": ConfidenceWords(
        "choices", "probability of an option, exp(sum of its token log-probabilities), divided by the sum over options"
    ),
    "choices_per_token": ConfidenceWords(
        "choices, per token", "exp(log-probability of an option / its tokens), divided by the sum over options"
    ),
    "choices_per_character": ConfidenceWords(
        "choices, per character", "exp(log-probability of an option / its characters), divided by the sum over options"
    ),
    "choices_per_byte": ConfidenceWords(
        "choices, per byte", "exp(log-probability of an option / its bytes in UTF-8), divided by the sum over options"
    ),
    "choices_unconditional": ConfidenceWords(
        "choices, minus unconditional",
        "exp(log-probability of an option with the question minus without it), divided by the sum over options",
    ),
    "option_letters": ConfidenceWords(
        "letters of options",
        "probability of the letter as the token of the answer, divided by the sum over all letters",
        "the letter of each option, as the token of the answer",
        "the prompt of the task, and the tokens before the answer",
    ),
    "first_token_options": ConfidenceWords(
        "options as first token",
        "probability of the option as the token of the answer, divided by the sum over all options",
        "each option, as the token of the answer",
        "the prompt of the task, and the tokens before the answer",
    ),
    "probabilities": ConfidenceWords(
        "probabilities by option",
        "probability of an option as logged, divided by the sum over options",
        _OPTIONS,
        "not in the log",
    ),
    "raw": ConfidenceWords("sequence", "exp(sum of the token log-probabilities of the answer)", _GENERATED),
    "per_token": ConfidenceWords("per token", "exp(mean of the token log-probabilities of the answer)", _GENERATED),
    "first_token": ConfidenceWords("first token", "exp(log-probability of the first token of the answer)", _GENERATED),
    "stated": ConfidenceWords(
        "stated",
        "confidence that the text of the answer states",
        _GENERATED,
        "the prompt, which asks for a confidence; the answer that precedes it",
    ),
    "reported": ConfidenceWords(
        "reported",
        "confidence that the log reports for the answer",
        _GENERATED,
        "not in the log: how the confidence was obtained must be reported with it",
    ),
    "forecast": ConfidenceWords(
        "forecast",
        "probability of the event that the log reports",
        "the event",
        "not in the log: how the forecast was obtained must be reported with it",
    ),
    "frequency": ConfidenceWords(
        "frequency",
        "fraction of the sampled answers to a question that agree with the most frequent one",
        "the most frequent one of the sampled answers",
        "the prompt of the task; answers are sampled independently",
    ),
}
"""Definitions of the confidences that logs contain, in the order of the table of an audit."""

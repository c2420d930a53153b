"""Calibration in tasks of the Language Model Evaluation Harness (lm-eval), by functions for the YAML file of a task.

`!function` of lm-eval reads Python files beside the YAML file. `utils.py` there has two lines:

    from torchcalib.integrations.lm_eval import choice_results, correctness_brier, ece, ece_if_calibrated
    process_results = choice_results(lambda doc: doc["answer"])

The task then has `process_results: !function utils.process_results`, and its `metric_list` has `acc`, and each metric
with its function as aggregation: `{metric: ece, aggregation: !function utils.ece, higher_is_better: false}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchcalib.integrations.answers import Pair, value_of
from torchcalib.io.logs.stated import stated_in

__all__ = [
    "choice_results",
    "correctness_auroc",
    "correctness_brier",
    "ece",
    "ece_if_calibrated",
    "ece_p_value",
    "stated_results",
]

Document = Mapping[str, Any]
_METRICS = ("ece", "ece_if_calibrated", "correctness_brier")


def choice_results(
    target: Callable[[Document], int], metrics: Sequence[str] = _METRICS
) -> Callable[[Document, Sequence[Any]], dict[str, Any]]:
    """Return `process_results` of a `multiple_choice` task: accuracy, and the events of all metrics of this module.

    The confidence is the probability of the most likely option, divided by the sum over options. Documents may have
    different numbers of options.

    Args:
        target: function that returns the index of the right option of a document.
        metrics: names of functions of this module, which `metric_list` must contain, in addition to `acc`.

    Returns:
        A function of a document and its results, `(log-probability, is greedy)` for each option, as lm-eval calls it.

    Example:
        >>> results = choice_results(lambda doc: doc["answer"])({"answer": 1}, [(-1.0, False), (-0.5, True)])
        >>> results["acc"], round(results["ece"][0], 3)
        (1.0, 0.622)
    """

    def process_results(doc: Document, results: Sequence[Any]) -> dict[str, Any]:
        probs = torch.tensor([float(score) for score, _ in results], dtype=torch.float64, device="cpu").softmax(0)
        confidence, chosen = probs.max(0)
        return _results(float(confidence), float(int(chosen) == target(doc)), metrics)

    return process_results


def stated_results(
    is_right: Callable[[Document, str], bool], metrics: Sequence[str] = _METRICS
) -> Callable[[Document, Sequence[str]], dict[str, Any]]:
    """Return `process_results` of a `generate_until` task whose answers state a confidence, such as "Confidence: 85%".

    The scale of numbers without a percent sign follows from all answers. Answers without a confidence are left out.

    Args:
        is_right: function that returns whether the answer in the text is right, from the document and the text.
        metrics: see `choice_results`.

    Returns:
        A function of a document and its results, a text, as lm-eval calls it.

    Example:
        >>> results = stated_results(lambda doc, text: doc["answer"] in text)
        >>> results({"answer": "Paris"}, ["Paris. Confidence: 85%"])["ece"]
        ('85%', 1.0)
    """

    def process_results(doc: Document, results: Sequence[str]) -> dict[str, Any]:
        return _results(stated_text(results[0]), float(is_right(doc, results[0])), metrics)

    return process_results


def stated_text(text: str) -> str | None:
    """Return the last confidence that a text states, such as "85%"; None without one."""
    found = stated_in(text)
    return None if found is None else f"{found.value:.15g}{'%' * found.is_percent}"


def _results(confidence: float | str | None, correct: float, metrics: Sequence[str]) -> dict[str, Any]:
    pair: Pair = confidence, correct
    return {"acc": correct, **dict.fromkeys(metrics, pair)}


def ece(items: Sequence[Pair]) -> float:
    """Return the expected calibration error (ECE) with 15 equal-width bins, as an aggregation of lm-eval."""
    return value_of("ece", items)


def ece_if_calibrated(items: Sequence[Pair]) -> float:
    """Return the noise floor: the expected ECE of a calibrated model with these confidences."""
    return value_of("ece_if_calibrated", items)


def ece_p_value(items: Sequence[Pair]) -> float:
    """Return the p-value of the test that the model is calibrated, with ECE as statistic, for one look at the data."""
    return value_of("ece_p_value", items)


def correctness_brier(items: Sequence[Pair]) -> float:
    """Return the binary Brier score of the confidence that the answer is right: the mean of (confidence - right)^2.

    The metric `brier_score` of lm-eval is another score: it adds the squared errors of all options.
    """
    return value_of("correctness_brier", items)


def correctness_auroc(items: Sequence[Pair]) -> float:
    """Return the probability that a right answer has a greater confidence than a wrong one."""
    return value_of("correctness_auroc", items)

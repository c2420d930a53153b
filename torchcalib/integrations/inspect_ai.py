"""Scorer and metrics of Inspect for stated confidences. Requires `pip install inspect-ai`.

@task
def trivia():
    scorer = with_stated_confidence(includes())
    return Task(dataset=..., solver=generate(), scorer=scorer)
"""

from __future__ import annotations

from torchcalib.integrations.answers import METRICS, value_of
from torchcalib.integrations.lm_eval import stated_text

try:
    from inspect_ai.scorer import (
        Metric,
        SampleScore,
        Score,
        Scorer,
        Target,
        accuracy,
        metric,
        scorer,
        value_to_float,
    )
    from inspect_ai.solver import TaskState
except ImportError as error:
    raise ImportError(
        "`torchcalib.integrations.inspect_ai` needs inspect-ai, which is not installed. Install it: pip install "
        "inspect-ai."
    ) from error


@metric(name="calibration")
def calibration(name: str = "ece") -> Metric:
    """Return a metric of the confidences in the metadata of scores, `{"confidence": ...}`.

    The confidence is a fraction, or a text such as "85%" or "85", whose scale follows from all texts. Samples without
    one are left out. Several epochs have fractional scores, which raise an error: read the log with `torchcalib.audit`.

    Args:
        name: `"ece"` (15 equal-width bins), `"ece_if_calibrated"` (its expectation for a calibrated model),
            `"ece_p_value"`, `"correctness_brier"` or `"correctness_auroc"`.

    Returns:
        The metric, for the argument `metrics` of a scorer or task.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in METRICS:
        raise ValueError(f"`name` must be one of {', '.join(METRICS)}, got {name!r}. Choose one.")
    to_float = value_to_float()

    def compute(scores: list[SampleScore]) -> float:
        found = [each.score for each in scores]
        return value_of(name, (((each.metadata or {}).get("confidence"), to_float(each.value)) for each in found))

    return compute


@metric
def ece() -> Metric:
    """Return the expected calibration error (ECE); see `calibration`."""
    return calibration("ece")


@metric
def ece_if_calibrated() -> Metric:
    """Return the noise floor of ECE; see `calibration`."""
    return calibration("ece_if_calibrated")


@metric
def correctness_brier() -> Metric:
    """Return the binary Brier score of the confidence that the answer is right; see `calibration`."""
    return calibration("correctness_brier")


@scorer(metrics=[accuracy(), ece(), ece_if_calibrated(), correctness_brier()])
def with_stated_confidence(of: Scorer) -> Scorer:
    """Return a scorer that adds the confidence in the text of an answer, such as "Confidence: 85%", to another scorer.

    Args:
        of: scorer that decides whether the answer is right, such as `includes()`.

    Returns:
        The scorer. `torchcalib.audit` reads the confidences from its log.
    """

    async def score(state: TaskState, target: Target) -> Score:
        found = await of(state, target)
        confidence = stated_text(state.output.completion)
        metadata = {**(found.metadata or {}), **({} if confidence is None else {"confidence": confidence})}
        return found.model_copy(update={"metadata": metadata})

    return score

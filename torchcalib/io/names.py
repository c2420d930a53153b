"""What names and shapes of arrays imply: roles, logits or probabilities, and the task. Does not import torch."""

import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from torchcalib.io.errors import InputError

Task = Literal["binary", "multiclass", "multilabel", "confidence"]
"""`"confidence"` is a binary task: predictions are confidences, and targets are 1 for correct predictions, else 0."""
TASKS: tuple[Task, ...] = ("binary", "multiclass", "multilabel")

_ANSWER = "answer option letter choice label"


def _compounds(first: str, second: str) -> list[str]:
    return [f"{word}_{part}" for word in first.split() for part in second.split()]


LOG_PROBS = ("log_probs", "logprobs", "log_prob", "logprob", "log_proba", "log_probabilities", "logp")
LOGITS = ("logits", "logit", "y_logit", "y_logits", *LOG_PROBS)
"""Names of logits. They include log-probabilities, because their softmax returns the probabilities."""
CONFIDENCES = (
    *("confidence", "confidences", "stated_confidence", "verbalized_confidence", "reported_confidence"),
    *("confidence_level", "model_confidence", "predicted_confidence", "conf", "certainty"),
)
"""Names of the confidence in the predicted class or answer."""
PROBS = (
    *("probs", "prob", "probabilities", "probability", "softmax", "y_prob", "y_probs", "y_proba", "proba", "probas"),
    *("pred_proba", "predict_proba", "predicted_proba", "forecast", "p", *CONFIDENCES),
)
NEUTRAL = (
    *("preds", "pred", "predictions", "prediction", "scores", "score", "outputs", "output"),
    *("y_pred", "y_score", "y_scores", "y_hat", "predicted"),
)
"""Names of predictions that are either logits or probabilities."""
CORRECT = ("correct", "is_correct", "correctness", "was_correct", "is_right", "answer_correct")
"""Names of targets that are 1 if the predicted class or answer is correct, else 0."""
FORECASTS = ("resolution", "resolved", "resolved_to", "resolve")
"""Names of outcomes of forecasts, whose confidence is the probability of "yes"."""
TARGET_TIERS = (
    (
        *_compounds("correct gold true right expected target", f"{_ANSWER} index idx class"),
        *("y_true", "true_labels", "answer_key", "gold", "ground_truth", "groundtruth", "gt", "reference_answer"),
        *("expected_output", "truth", "actual", "actual_label"),
    ),
    ("targets", "target", "labels", "label", "y", "y_test", "y_val", "y_valid", "expected", "reference", "winner"),
    ("answer_index", "answer_idx", "answer", "class", "outcome", *FORECASTS),
)
"""Names of targets, from specific to general ones. Targets have the most specific name that occurs."""
TARGETS = (*(name for tier in TARGET_TIERS for name in tier), *CORRECT)
PREDICTED = (
    *_compounds("pred predicted", f"{_ANSWER} index idx class"),
    *_compounds("model llm chosen selected parsed extracted given", _ANSWER),
    *("pred_labels", "predicted_labels", "y_pred", "pred", "preds", "prediction", "predictions", "predicted", "y_hat"),
    *("argmax", "top_label", "top_class", "model_prediction", "final_answer"),
)
"""Names of the class or answer that a model predicts, if their values are text or whole numbers."""
OF_PREDICTED = (
    *("pred_prob", "pred_probability", "predicted_prob", "predicted_probability", "prob_pred", "prob_predicted"),
    *("pred_score", "pred_conf", "pred_confidence", "prediction_confidence", "confidence_score", "max_prob"),
    *("prob_max", "max_probability", "top_prob", "top1_prob", "prob_top1", "msp", "probability_of_prediction"),
)
"""Names of the probability of the predicted class, beside those in `PROBS`."""
OF_ANSWERS = ("p_true", "prob_correct", "p_correct", "forecast", "probability", "prob", "predict")
"""Further names of the confidence in the answer of a language model."""
OF_OPTIONS = ("probs", "probabilities", "distribution", "option_probs", "choice_probs", "log_probs", "logprobs")
"""Names of the probabilities of all options of a question."""
VERDICTS = (
    *("acc", "accuracy", "exact_match", "em", "passed", "grade", "verdict", "judgement", "judgment"),
    *("outcome", *FORECASTS, "score"),
)
"""Names of outcomes in logs of language models, beside those in `CORRECT`."""
IDS = (
    *("custom_id", "item_id", "doc_id", "question_id", "query_id", "problem_id", "prob_id", "native_id", "uid"),
    *("qid", "example_id", "instance_id", "case_id", "id", "sample_id", "task_id", "idx", "index", "doc_hash"),
)
"""Names of the identifier of a question. With the names of its data set, it identifies the question."""
DATA_SETS = (
    *("task", "task_name", "ds_name", "dataset", "dataset_name", "data_set", "benchmark", "subject", "subset"),
    *("subtask", "source", "domain"),
)
QUESTIONS = ("doc_hash", "question_hash", "question", "question_text", "query", "problem", "input", "prompt")
"""Names of the content of a question. Rows with other contents are other questions, whatever their name is."""
RESPONSES = (
    *("response", "output", "completion", "model_output", "model_response", "raw_response", "generation"),
    *("generated_text", "text"),
)
"""Names of a text that contains the answer, and possibly a confidence."""
MISSING = ("", "nan", "na", "n/a", "#n/a", "#na", "<na>", "none", "null")
"""Texts for a missing value, in lower case."""
WEIGHTS = ("weights", "weight", "sample_weight", "sample_weights")
OUTCOMES = (
    *(("incorrect", "correct"), ("wrong", "right"), ("no", "yes"), ("n", "y"), ("false", "true"), ("f", "t")),
    *(("fail", "pass"), ("failed", "passed"), ("negative", "positive"), ("neg", "pos"), ("0", "1")),
)
"""Texts for the outcomes 0 and 1 of a binary target, in lower case."""
INDEX = ("", "index", "id", "idx", "unnamed:_0", "__index_level_0__")
"""Names of columns with row numbers or row labels."""

_WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_PERCENT = re.compile(r"\s*(\d{1,3}(?:\.\d{1,20})?)\s*%\s*")
_MAX_DIGITS = 9  # longer numbers are identifiers


def key_of(name: str) -> str:
    """Return a name in lower case with underscores between words, as in `true_label` for "True Label" or trueLabel."""
    return re.sub(r"[\s\-.]+", "_", _WORD_STARTS.sub("_", name.strip().removeprefix("#").lstrip())).lower()


def numbered(name: str) -> tuple[str, int] | None:
    """Split a name such as `prob_0`, `prob.0` or `prob0` into stem and number, ("prob", 0); None for other names."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    if not 0 < len(digits) <= _MAX_DIGITS:
        return None
    return stem[:-1] if len(stem) > 1 and stem[-1] in "_." else stem, int(digits)


def are_logits(key: str) -> bool | None:
    """Return True for a name of logits, False for a name of probabilities, and None for an ambiguous name.

    A compound name, such as `resnet_prob` or `p_resnet`, is classified by its words.
    """
    parts = numbered(key)
    key = key_of(parts[0] if parts else key)
    if key in OF_PREDICTED:
        return False
    if key in LOGITS or key in PROBS:
        return key in LOGITS
    words = set(re.split(r"[_:]+", key))
    logits, probs = bool(words & {*LOGITS, "log"}), bool(words & set(PROBS))
    return logits if logits or probs else None


def named_as_logits(names: Iterable[str], where: str) -> bool | None:
    """Return whether columns are logits by their names; None if a name is ambiguous, and all values decide."""
    meanings = set(map(are_logits, names))
    if meanings == {True, False}:
        raise InputError(
            f"{where} must be logits or probabilities, got names of both. Choose other columns, or pass "
            "from_logits=True or from_logits=False."
        )
    return None if None in meanings or not meanings else meanings == {True}


def outcome_names(texts: Iterable[str]) -> tuple[str, ...]:
    """Return texts such as "no" and "yes" in the order of the outcomes 0 and 1, or `()` for other texts.

    A text that does not occur is completed.
    """
    distinct = set(texts)
    given, n_texts = {text.lower(): text for text in distinct}, len(distinct)
    for pair in OUTCOMES:
        if given and set(given) <= set(pair) and len(given) == n_texts:
            return tuple(given.get(name, name) for name in pair)
    return ()


def is_numeral(text: str) -> bool:
    """Return whether `float` converts a text."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def percent_in(text: str) -> float | None:
    """Return the number in a text such as "70%" or "70 %"; None for other texts."""
    match = _PERCENT.fullmatch(text)
    return float(match[1]) if match else None


def single_axis(longer: Sequence[int], shorter: Sequence[int]) -> int | None:
    """Return the axis of size 1 that only `longer` has, -1 or 1, as in `(N, 1)` and `(N,)`; None for other shapes."""
    if len(longer) != len(shorter) + 1:
        return None
    for axis in (-1, 1):
        if longer[axis:][:1] == (1,) and (*longer[:axis], *(longer[axis:][1:])) == tuple(shorter):
            return axis
    return None


def extra_axes(preds: Sequence[int], target: Sequence[int]) -> tuple[int | None, int | None]:
    """Return the axes of size 1 that only predictions, and only targets have, as in `(N, 1)` and `(N,)`, or None."""
    axis, extra = single_axis(preds, target), single_axis(target, preds)
    if axis is None and target[-1:] == (2,):  # annotator counts
        axis = single_axis(preds, target[:-1])
    if extra is None and len(target) > 1 and (*preds[:-1], 1) == target != preds:
        extra = -1  # multi-class labels
    return axis, extra if axis is None else None


class Shapes(NamedTuple):
    """Shapes from which the task follows."""

    preds: tuple[int, ...]
    target: tuple[int, ...]
    may_be_counts: bool  # whether targets are whole numbers
    found: str = ""  # description for messages


def task_of(
    task: Task | None,
    num_classes: int | None = None,
    num_labels: int | None = None,
    *,
    positive_classes: Sequence[int] | None = None,
    shapes: Shapes | None = None,
    **_other_options: object,
) -> Task:
    """Return `task`, or "binary" for "confidence". If it is None, return the task that options or shapes imply.

    Functions, classes, frames and files use this rule. An axis of size 1 has no classes. Equal shapes with more axes
    are ambiguous: multi-label targets, one-hot labels, class probabilities or binary maps. The values of targets never
    decide.

    Raises:
        TypeError: without a task, such options and shapes.
        ValueError: for ambiguous shapes, and for shapes that no task has.
    """
    if task is not None:
        return "binary" if task == "confidence" else task
    if positive_classes is not None:
        return "multiclass"
    if (num_classes is None) != (num_labels is None):
        return "multilabel" if num_classes is None else "multiclass"
    if shapes is None:
        raise TypeError(
            "`task` must be 'binary', 'multiclass' or 'multilabel', got None. Pass task=..., num_classes or num_labels."
        )
    preds, target, may_be_counts, found = shapes
    if preds == target and (len(preds) == 1 or (preds and 1 in (preds[1], preds[-1]))):
        return "binary"
    if single_axis(preds, target) is not None or single_axis(target, preds) is not None:
        return "binary"
    with_class_axis = ((*preds[:-1], 1), (*preds[:1], 1, *preds[2:]))
    if len(preds) > 1 and preds != target and (target in with_class_axis or len(target) == len(preds) - 1):
        return "multiclass"
    found = found or (f"{preds} for both" if preds == target else f"shapes {preds} and {target}")
    if may_be_counts and target == (*preds, 2):
        task = "binary" if len(preds) == 1 else "multilabel"
        raise ValueError(
            f"`task` must be given if `target` may contain annotator counts for no and yes, got {found}. "
            f"Pass task={task!r} if it contains counts."
        )
    if preds == target and len(preds) > 1:
        maps = ", or task='binary' if every entry is the probability of its own event" if len(preds) > 2 else ""
        raise ValueError(
            f"`task` must be given if `target` has the shape of `preds`, got {found}. Pass task='multiclass' if every "
            "sample has one class (one-hot labels, class probabilities or annotator counts), task='multilabel' if it "
            f"can have several labels{maps}. Flatten both for unrelated samples."
        )
    raise ValueError(
        f"`target` must have one label for each sample of `preds`, got {found}. Pass binary (N,) and (N,), "
        "multi-class (N, C) and (N,), or multi-label (N, L) and (N, L) with task='multilabel'."
    )


_FEW_NEGATIVE = 0.05
"""Predictions with a larger fraction of negative values are logits."""


MAX_LOGIT = 30.0
"""Largest plausible logit: the sigmoid of a larger one differs from 1 by less than 1e-13."""


def are_logits_by_values(n_negative: float, n: float, task: Task) -> bool:
    """Return whether predictions are logits: if more than 5% of all values are negative.

    Fewer may be errors or ignored rows. All negative values of a binary or multi-label task raise ValueError, because
    they may be log-odds or log-probabilities.
    """
    if n_negative == n > 1 and task != "multiclass":
        raise ValueError(
            "`from_logits` must be given if all predictions are negative, which are log-odds or log-probabilities. "
            "Pass from_logits=True for log-odds (the input of a sigmoid), or preds.exp() for log-probabilities."
        )
    return n_negative > _FEW_NEGATIVE * n

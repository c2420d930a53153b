"""Advice on calibrators against the truth: `python -m benchmarks.gains`.

A data set has N samples with logits N(0, 2^2) for each of C classes (two classes: log-odds are N(0, 2^2)), and labels
from a law. Calibrators are cross-validated as in a report, for many data sets at once. The true gain is that
of the fit to all samples, from the conditional risk on fresh logits, whose class probabilities are known. The verdict
is that of `benchmarks.diagnosis`. A gain of any size is worthwhile unless the verdict says otherwise.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from benchmarks.diagnosis import Data, found_in
from benchmarks.study import Cell, Found, Part, Row, Study, main
from torchcalib.calibration.affine import AffineScaling, BiasCorrection, TemperatureScaling
from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.cross_validation import calibrated_by_fold, weights_of_training_parts
from torchcalib.calibration.folds import folds_of
from torchcalib.calibration.recommendation import Recommendation, applicable, is_advisable, recommendation_of
from torchcalib.calibration.selection import (
    Candidate,
    candidate_of,
    chi_squared_tail,
    contributions,
    likelihood_ratio,
    row_scores,
)
from torchcalib.core.inputs import read_input
from torchcalib.core.predictions import Predictions
from torchcalib.reporting.calibration import FOLDS
from torchcalib.reporting.findings import Findings, decide
from torchcalib.results.calibration import CalibrationStage, CalibratorLine
from torchcalib.results.decision import Decision

N_FRESH = {2: 10_000, 10: 4_000}
N_DETAILED = 200  # number of data sets for the true gains of all calibrators
AT_ONCE = 2**15
"""Number of samples of data sets that are evaluated together."""

LAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "calibrated": lambda z: z,
    "log-odds - 1": lambda z: z - torch.tensor([0.0, 1.0]),
    "log-odds + 0.5": lambda z: z + torch.tensor([0.0, 0.5]),
    "log-odds x 0.6": lambda z: 0.6 * z,
    "log-odds x 1.5": lambda z: 1.5 * z,
    "logits x 1.3": lambda z: 1.3 * z,
    "one class - 1": lambda z: torch.cat((z[..., :1] - 1, z[..., 1:]), -1),
}
"""Functions from the logits of the labels to those of the model."""

CELLS = (
    (2, 100, "calibrated"),
    (2, 300, "calibrated"),
    (10, 300, "calibrated"),
    (10, 1000, "calibrated"),
    (2, 300, "log-odds - 1"),
    (2, 1000, "log-odds + 0.5"),
    (2, 1000, "log-odds x 0.6"),
    (2, 1000, "log-odds x 1.5"),
    (2, 300, "log-odds x 1.5"),
    (10, 300, "logits x 1.3"),
    (10, 1000, "one class - 1"),
)
"""Number of classes, number of samples and law."""


class Outcome(NamedTuple):
    """Result of one data set: gains in percent, and whether each statement holds."""

    has_evidence: bool  # a likelihood ratio has p < 1%, adjusted for the number of calibrators
    is_advised: bool
    gain: float
    low: float
    high: float
    true: float
    is_contradicted: bool
    lacks_advice: bool  # verdict "clearly" or "badly" by a temperature or a bias, without advice
    every: dict[str, tuple[float, float, float, float]]  # gain, interval and true gain of each calibrator


def drawn(n_sets: int, n: int, num_classes: int, law: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-odds or logits of the model, class probabilities and labels of data sets, `(B, N, ...)`."""
    generator = torch.Generator().manual_seed(seed)
    z = normal_logits(n_sets, n, num_classes, generator)
    q = z.softmax(-1)
    labels = torch.multinomial(q.flatten(0, 1), 1, generator=generator).reshape(n_sets, n)
    shown = LAWS[law](z)
    return (shown if num_classes > 2 else shown[..., 1] - shown[..., 0]), q, labels


def normal_logits(n_sets: int, n: int, num_classes: int, generator: torch.Generator) -> Tensor:
    """Return logits of data sets `(B, N, C)`; 0 and the log-odds for two classes."""
    z = 2 * torch.randn(n_sets, n, num_classes - (num_classes == 2), generator=generator, dtype=torch.float64)
    return z if num_classes > 2 else torch.cat((torch.zeros_like(z), z), -1)


def log_probs(values: Tensor, num_classes: int) -> Tensor:
    """Return log-probabilities `(..., N, C)` of logits, or of log-odds `(..., N)` for two classes."""
    return values.log_softmax(-1) if num_classes > 2 else torch.stack((logsigmoid(-values), logsigmoid(values)), -1)


CAUSES = ("over-confidence", "under-confidence", "spread", "class bias")


def decision_of(found: Findings, recommended: Recommendation) -> Decision:
    """Return the decision of a report, in which the accuracy after calibration is not known."""
    lines = tuple(CalibratorLine(name, 0.0, 0.0, 0.0, 0.0) for name in ("none", *recommended.rcl))
    empty: Any = None
    return decide(found, CalibrationStage(recommended, lines, empty, empty, 5, 1, 0))


def fresh_of(num_classes: int, law: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return predictions and class probabilities of new data; for two classes quantiles, without sampling noise."""
    z = normal_logits(1, N_FRESH[num_classes], num_classes, torch.Generator().manual_seed(10_000 + seed))[0]
    if num_classes == 2:
        z[:, 1] = 2 * torch.special.ndtri((torch.arange(len(z), dtype=torch.float64) + 0.5) / len(z))
    shown = LAWS[law](z)
    return (shown if num_classes > 2 else shown[:, 1] - shown[:, 0]), z.softmax(-1)


def contradicts(decision: Decision, recommended: Recommendation) -> bool:
    """Return whether sentences of a report contradict each other.

    No calibrator is advised beside the verdict "badly", or beside "clearly" although there is evidence for a gain, or
    with the advice to use the predictions; a calibrator is advised for calibrated predictions; or it is advised for a
    gain whose interval contains 0, without a sentence on it.
    """
    if decision.degree and not decision.calibrator:
        has_evidence = recommended.p_value is not None and recommended.p_value < 0.01
        is_used = "Use the predictions as they are" in decision.action
        return decision.degree != "slightly" and (decision.degree == "badly" or has_evidence or is_used)
    if decision.kind in ("calibrated", "too little data") and decision.calibrator:
        return True
    contains_0 = decision.interval is not None and decision.interval.low <= 0
    return bool(decision.calibrator and contains_0 and "This gain is uncertain" not in decision.action)


def outcomes(num_classes: int, n: int, law: str, n_sets: int, seed: int) -> list[Outcome]:
    """Return the outcomes of several data sets."""
    task = "multiclass" if num_classes > 2 else "binary"
    values, _, labels = drawn(n_sets, n, num_classes, law, seed)
    options = {"from_logits": True}
    p = read_input(task, values, labels, {**options, "batch_dims": 1})
    one = [read_input(task, values[b], labels[b], options) for b in range(n_sets)]
    splits, n_folds = folds_of(p, FOLDS)
    weights = weights_of_training_parts(p, splits, n_folds)
    fresh, q = fresh_of(num_classes, law, seed)

    def risk(fit: Calibrator | None) -> float:
        after = log_probs(fresh if fit is None else fit.calibrated(fresh, True), num_classes)
        return -float((q * after).masked_fill(q == 0, 0).sum(-1).mean())

    before, raw_risk = row_scores("nll", p, p.values), risk(None)
    candidates: list[dict[str, Candidate]] = [{} for _ in one]
    whole: dict[str, Calibrator] = {}
    after: dict[type[Calibrator], Tensor] = {}
    for calibrator in applicable(one[0])[0]:
        if not is_advisable(calibrator, "nll"):
            continue
        fits = calibrator.fit_to(p, weights)
        each = [calibrated_by_fold(p, fits, folds, n_folds, k * n_folds) for k, folds in enumerate(splits)]
        held_out = torch.stack([row_scores("nll", p, x) for x in each]).mean(0)
        fit = whole[calibrator.name] = calibrator.fit_to(p)
        in_sample = after[type(calibrator)] = row_scores("nll", p, fit.calibrated(p.values, True))
        for b, of_set in enumerate(one):
            parts, of_fit = (contributions(x[b], of_set) for x in (held_out, in_sample))
            nll = before[b], in_sample[b]
            candidates[b][calibrator.name] = candidate_of(calibrator, of_set, parts, of_fit, nll, is_advisable=True)
    found_outcomes = []
    for b, of_set in enumerate(one):
        fits_of_set = {type(fit): fit.part(b) for fit in whole.values()}
        found = found_in(task, of_set, Data(values[b], labels[b]), fits_of_set, {k: x[b] for k, x in after.items()})
        parts = contributions(before[b], of_set)
        recommended = recommendation_of("nll", parts, candidates[b])
        recommended = recommended.advised(found.worthwhile, is_faulty=found.is_faulty)
        of_size = recommended.advised(0.0)
        decision = decision_of(found, recommended)
        is_detailed = seed * n_sets <= N_DETAILED
        names = recommended.advisable if is_detailed else (recommended.preferred,)
        true = {name: 100 * (1 - risk(whole[name].part(b)) / raw_risk) for name in names}
        every = {name: (recommended.rcl[name], *recommended.intervals[name], true[name]) for name in names}
        low, high = of_size.interval or (math.nan, math.nan)
        found_outcomes.append(
            Outcome(
                recommended.p_value is not None and recommended.p_value < 0.01,
                of_size.best is not None,
                of_size.gain,
                low,
                high,
                true[of_size.preferred],
                contradicts(decision, recommended),
                decision.kind in CAUSES and decision.degree in ("clearly", "badly") and not decision.calibrator,
                every,
            )
        )
    return found_outcomes


def gains_of(num_classes: int, n: int, law: str, n_sets: int) -> dict[str, Any]:
    """Return the row of a cell, and the rows of its calibrators."""
    size = max(1, min(n_sets, AT_ONCE // (n * num_classes)))
    found = [x for seed in range(1, 1 + -(-n_sets // size)) for x in outcomes(num_classes, n, law, size, seed)]
    columns = [torch.tensor(x, dtype=torch.float64) for x in zip(*(each[:-1] for each in found), strict=True)]
    evidence, advised, gain, low, high, true, contradicted, lacking = columns
    is_advised, covered = advised > 0, ((low <= true) & (true <= high)).double()
    of_advised = [""] * 3
    if bool(is_advised.any()):
        shares = covered, (low <= 0).double(), (true < 0).double()
        of_advised = [f"{float(x[is_advised].mean()):.1%}" for x in shares]
    row = [
        f"{len(found):,}",
        *(f"{float(x.mean()):.1%}" for x in (evidence, advised)),
        *(f"{float(x.mean()):.2f}" for x in (true, gain)),
        with_error(gain - true),
        f"{float(covered.mean()):.1%}",
        *of_advised,
        *(f"{float(x.mean()):.1%}" for x in (contradicted, lacking)),
    ]
    return {"row": row, "calibrators": list(by_calibrator(found))}


def with_error(x: Tensor) -> str:
    """Return the mean and its standard error."""
    return f"{float(x.mean()):+.2f} ± {float(x.std() / math.sqrt(len(x))):.2f}"


def by_calibrator(found: list[Outcome]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, mean true gain, bias with its standard error, and coverage of each calibrator with finite gains."""
    for name in found[0].every:
        x = torch.tensor([e.every[name] for e in found[:N_DETAILED] if name in e.every], dtype=torch.float64)
        gain, low, high, true = x[x[:, (0, 3)].isfinite().all(-1)].unbind(-1)
        covered = ((low <= true) & (true <= high)).double().mean()
        yield name, f"{float(true.mean()):.2f}", with_error(gain - true), f"{float(covered):.1%}"


def tables(found: dict[Cell, Found]) -> Iterator[list[Row]]:
    yield [(*cell, *each.values["row"]) for cell, each in found.items()]
    yield [(*cell, *row) for cell, each in found.items() for row in each.values["calibrators"]]


TARGETS = ("5 annotators", "beta", "beta, varying", "labels", "labels in 50 clusters", "exponential weights")
"""Targets for the level of likelihood ratios of a temperature, of biases and of both."""


def null_statistics(target: str, num_classes: int, n: int, n_sets: int, seed: int) -> Tensor:
    """Return p-values of temperature, bias and both for calibrated predictions, `(B, 3)`."""
    generator = torch.Generator().manual_seed(seed)
    z = normal_logits(n_sets, n, num_classes, generator)
    q, options, effect, groups = z.softmax(-1), {"from_logits": True}, 1.0, None
    values = z if num_classes > 2 else z[..., 1] - z[..., 0]
    drawn_labels = torch.multinomial(q.flatten(0, 1), 5, replacement=True, generator=generator).reshape(n_sets, n, 5)
    if target == "5 annotators":
        t = torch.nn.functional.one_hot(drawn_labels, num_classes).double().mean(-2)
    elif target.startswith("beta"):  # Dirichlet: gammas divided by their sum
        size = 3.0 if target == "beta" else 0.5 + 10 * torch.rand(n_sets, n, 1, generator=generator)
        torch.manual_seed(seed)
        t = torch.distributions.Dirichlet((size * q).clamp(min=1e-6)).sample()
    else:
        t = None
    if target == "labels in 50 clusters":  # rows of a cluster are copies of one row
        size = n // 50
        groups = torch.arange(50).repeat_interleave(size)
        values, drawn_labels = (x[:, : 50 * size : size].repeat_interleave(size, 1) for x in (values, drawn_labels))
        effect = float(size)
    if target == "exponential weights":
        options["weights"] = torch.empty(n_sets, n, dtype=torch.float64).exponential_(generator=generator)
    soft = t if t is None or num_classes > 2 else t[..., 1]
    target_values = drawn_labels[..., 0] if soft is None else soft
    task = "multiclass" if num_classes > 2 else "binary"
    p = read_input(task, values, target_values, {**options, "batch_dims": 1})
    found = []
    for calibrator in (TemperatureScaling(), BiasCorrection(), AffineScaling()):
        fit = calibrator.fit_to(p)
        after = row_scores("nll", p, fit.calibrated(p.values, True))
        k = calibrator.n_parameters(num_classes)
        of_sets = []
        for b in range(n_sets):
            weights = None if p.weights is None else p.weights[b]
            one = _row_of(p, b, weights, groups)
            statistic = likelihood_ratio(one, p.cross_entropy[b], after[b], effect)
            of_sets.append(chi_squared_tail(statistic, k))
        found.append(of_sets)
    return torch.tensor(found, dtype=torch.float64).T


def _row_of(p: Predictions, b: int, weights: Tensor | None, groups: Tensor | None) -> Predictions:
    return replace(p, input_preds=p.input_preds[b], input_target=p.input_target[b], weights=weights, groups=groups)


def level_of(target: str, num_classes: int, n: int, n_sets: int) -> list[str]:
    """Return the shares of p-values below 5 % and below 1 %."""
    p_values = torch.cat([null_statistics(target, num_classes, n, max(1, n_sets // 10), seed) for seed in range(10)])
    shares = [(p_values < level).double().mean(0).tolist() for level in (0.05, 0.01)]
    return [f"{len(p_values):,}", *(f"{x:.1%}" for of_level in shares for x in of_level)]


LEVEL_CELLS = [(target, *size) for size, target in product(((2, 100), (2, 500), (5, 300)), TARGETS)]
STUDY = Study(
    "gains",
    1_000,
    [Part(CELLS, gains_of, tables), Part(LEVEL_CELLS, level_of, share=lambda _: 2, name="level")],
)

if __name__ == "__main__":
    main(STUDY)

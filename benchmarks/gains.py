"""Advice on calibrators against the truth: `python -m benchmarks.gains`.

A data set has N samples with logits N(0, 2^2) for each of C classes (two classes: log-odds are N(0, 2^2)), and labels
from a law. Gains, advice and verdict are those of a report. The true gain is that of the fit to all samples, from the
conditional risk on fresh logits, whose class probabilities are known. A gain of any size is worthwhile unless the
verdict says otherwise.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import torchcalib as tc
from benchmarks.study import Cell, Found, Part, Row, Study, main
from torchcalib.calibration.affine import AffineScaling, BiasCorrection, TemperatureScaling
from torchcalib.calibration.recommendation import CALIBRATORS, Recommendation
from torchcalib.calibration.selection import chi_squared_tail, likelihood_ratio, row_scores
from torchcalib.core.inputs import read_input
from torchcalib.core.predictions import Predictions
from torchcalib.results.decision import Decision

N_FRESH = {2: 10_000, 10: 4_000}
N_DETAILED = 200  # number of data sets for the true gains of all calibrators

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


def drawn(n: int, num_classes: int, law: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return log-odds or logits of the model, and labels."""
    generator = torch.Generator().manual_seed(seed)
    z = normal_logits(1, n, num_classes, generator)[0]
    labels = torch.multinomial(z.softmax(-1), 1, generator=generator).squeeze(-1)
    shown = LAWS[law](z)
    return (shown if num_classes > 2 else shown[:, 1] - shown[:, 0]), labels


def normal_logits(n_sets: int, n: int, num_classes: int, generator: torch.Generator) -> Tensor:
    """Return logits of data sets `(B, N, C)`; 0 and the log-odds for two classes."""
    z = 2 * torch.randn(n_sets, n, num_classes - (num_classes == 2), generator=generator, dtype=torch.float64)
    return z if num_classes > 2 else torch.cat((torch.zeros_like(z), z), -1)


def log_probs(values: Tensor, num_classes: int) -> Tensor:
    """Return log-probabilities `(..., N, C)` of logits, or of log-odds `(..., N)` for two classes."""
    return values.log_softmax(-1) if num_classes > 2 else torch.stack((logsigmoid(-values), logsigmoid(values)), -1)


CAUSES = ("over-confidence", "under-confidence", "spread", "class bias")


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


def outcome(num_classes: int, n: int, law: str, seed: int) -> Outcome:
    """Return the outcome of a data set."""
    given: dict[str, Any] = {"task": "multiclass" if num_classes > 2 else "binary", "from_logits": True}
    values, labels = drawn(n, num_classes, law, seed)
    report = tc.report(values, labels, **given, with_intervals=False, with_classes=False)
    assert report.calibration is not None
    decision, recommended = report.decision, report.calibration.recommendation
    fresh, q = fresh_of(num_classes, law, seed)

    def risk(predictions: Tensor) -> float:
        return -float((q * log_probs(predictions, num_classes)).masked_fill(q == 0, 0).sum(-1).mean())

    def true_gain(name: str) -> float:
        kind = next(kind for kind in CALIBRATORS if kind.name == name)
        return 100 * (1 - risk(kind().fit(values, labels, **given)(fresh)) / risk(fresh))

    names = recommended.advisable if seed <= N_DETAILED else (recommended.preferred,)
    every = {name: (recommended.rcl[name], *recommended.intervals[name], true_gain(name)) for name in names}
    of_size = recommended.advised(0.0)
    return Outcome(
        recommended.p_value is not None and recommended.p_value < 0.01,
        of_size.best is not None,
        of_size.gain,
        *(of_size.interval or (math.nan, math.nan)),
        every[of_size.preferred][-1],
        contradicts(decision, recommended),
        decision.kind in CAUSES and decision.degree in ("clearly", "badly") and not decision.calibrator,
        every,
    )


def gains_of(num_classes: int, n: int, law: str, n_sets: int) -> dict[str, Any]:
    """Return the row of a cell, and the rows of its calibrators."""
    found = [outcome(num_classes, n, law, seed) for seed in range(1, 1 + n_sets)]
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

"""Power of calibration tests at the number of rows of `required_n`: `python -m benchmarks.required_n`, in 5 minutes.

A data set has the number of rows with which the error is detected with probability 0.8. Labels are drawn from the
probabilities of the fault, and the p-value is that of the test of a report.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

import torchcalib as tc
from benchmarks.laws import beta, normal, normal_log_odds, random
from benchmarks.study import Part, Study, batches, main, percent

LEVEL, POWER, AT_ONCE, N_REPLICATES = 0.05, 0.8, 2**20, 499
N_CLASSES, CLUSTER, SHARED = 10, 5, 0.5  # classes, rows of a cluster, and probability that a row has the common chance
METRICS = {"esce": tc.ESCE, "ece": tc.ECE, "rmsce": tc.RMSCE}


class Setting(NamedTuple):
    """An error to detect, the law of the confidences, and the arguments of `required_n`."""

    error: float
    draw: Callable[[int, Generator], Tensor]
    given: dict[str, Any]


def logits(n: int, g: Generator) -> Tensor:
    return 2 * normal(n, N_CLASSES, g=g)


SETTINGS = {
    "binary, uniform, shift": Setting(0.02, lambda n, g: random(n, g=g), {"spread": 12**-0.5}),
    "binary, rare, shift": Setting(-0.01, lambda n, g: beta(0.9, 17.1, n, g), {"prevalence": 0.05, "spread": 0.05}),
    "binary, uniform, over-confident": Setting(
        -0.03, lambda n, g: random(n, g=g), {"fault": "temperature", "spread": 12**-0.5}
    ),
    "binary, logit SD 2, under-confident": Setting(
        0.03, lambda n, g: normal_log_odds(0, 2, n, g), {"fault": "temperature"}
    ),
    "top label, shift": Setting(-0.02, logits, {}),
    "top label, over-confident": Setting(-0.02, logits, {"fault": "temperature"}),
    "one of 10 classes, shift": Setting(0.02, logits, {"n_tests": N_CLASSES}),
    "clusters of 5 rows, shift": Setting(0.03, lambda n, g: random(n, g=g), {"spread": 12**-0.5}),
}


def size_of_fault(error: float, change: Callable[[float], Tensor], c: Tensor) -> float:
    """Return the size of a fault with this mean of |q - c|, by bisection."""
    low, high = 0.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        is_below = float((change(math.copysign(middle, error)) - c).abs().mean()) < abs(error)
        low, high = (middle, high) if is_below else (low, middle)
    return math.copysign(high, error)


def true_of(name: str, p: Tensor, x: float) -> Tensor:
    """Return the true probabilities of the event for a fault of size x; of all classes for logits `(..., C)`."""
    if name.startswith("top label, over"):
        return (p * math.exp(x)).softmax(-1)
    if name.startswith(("top label", "one of")):
        probs = p.softmax(-1)
        event = probs.argmax(-1, keepdim=True) if name.startswith("top") else torch.zeros_like(p[..., :1]).long()
        own = (probs.gather(-1, event).logit() + x).sigmoid()
        return (probs * (1 - own) / (1 - probs.gather(-1, event))).scatter(-1, event, own)
    return (p.logit() * math.exp(x)).sigmoid() if "confident" in name else (p.logit() + x).sigmoid()


def of_event(name: str, p: Tensor, of: Tensor) -> Tensor:
    """Return the probability of the event among those of all classes."""
    if p.dim() == of.dim() == 1:
        return of
    event = p.argmax(-1, keepdim=True) if name.startswith("top") else torch.zeros_like(p[..., :1]).long()
    return of.gather(-1, event).squeeze(-1)


SCORES = ("log loss", "Brier score", "log loss, clusters of 5 rows", "Brier score, clusters of 5 rows")


def difference_of(name: str, p: Tensor, y: Tensor) -> Tensor:
    """Return the score of an over-confident system, whose log-odds are 1.3 times too large, minus that of p."""
    b = (1.3 * p.logit()).sigmoid()
    if "Brier" in name:
        return (y - b).square() - (y - p).square()
    return y * (p / b).log() + (1 - y) * ((1 - p) / (1 - b)).log()


def of_two_systems(name: str, n_sets: int) -> list[str]:
    """Return the power of the comparison of the scores of two systems on the same rows."""
    g, is_clustered = Generator().manual_seed(3), "clusters" in name

    def means(n_data: int, n: int) -> Tensor:
        """Return the mean differences of clusters, or the differences of rows, `(D, G)`."""
        if not is_clustered:
            p = normal_log_odds(0, 1.5, n_data * n, g).reshape(n_data, n)
            return difference_of(name, p, (random(n_data, n, g=g) < p).double())
        p = normal_log_odds(0, 1.5, n_data * n // CLUSTER, g).repeat_interleave(CLUSTER).reshape(n_data, n)
        common = random(n_data, n // CLUSTER, g=g).repeat_interleave(CLUSTER, 1)
        u = torch.where(random(n_data, n, g=g) < SHARED, common, random(n_data, n, g=g))
        return difference_of(name, p, (u < p).double()).unflatten(1, (-1, CLUSTER)).mean(-1)

    # Mean and spread of a row are expected values for the outcomes of many forecasts.
    p = normal_log_odds(0, 1.5, 2**20, g)
    if_one, if_zero = (difference_of(name, p, torch.full_like(p, y)) for y in (1.0, 0.0))
    error = float((p * if_one + (1 - p) * if_zero).mean())
    spread = math.sqrt(float((p * if_one.square() + (1 - p) * if_zero.square()).mean()) - error**2)
    effect = float(means(1, CLUSTER * 2**18).var()) * CLUSTER / spread**2 if is_clustered else 1.0
    n = tc.required_n(error, spread=spread, systems=2, design_effect=effect)
    n = CLUSTER * math.ceil(n / CLUSTER) if is_clustered else n
    found = []
    for d in batches(n_sets, AT_ONCE // n):
        differences = means(d, n)
        z = differences.mean(1) / differences.std(1) * differences.shape[1] ** 0.5
        found.append(z.abs() >= 1.96)
    return [f"{error:+.4f}", "difference", f"{n:,}", percent(torch.cat(found))]


def p_values(name: str, p: Tensor, q: Tensor, test: str, g: Generator) -> Tensor:
    """Return the p-values of data sets `(D,)` for confidences or logits `(D, N, ...)` and true probabilities."""
    if name.startswith("clusters"):
        own, common = random(*p.shape, g=g), random(*p.shape[:1], p.shape[1] // CLUSTER, g=g)
        is_common = random(*p.shape, g=g) < SHARED
        y = (torch.where(is_common, common.repeat_interleave(CLUSTER, 1), own) < q).long()
        clusters = torch.arange(p.shape[1]) // CLUSTER
        found = []
        for each, labels in zip(p, y, strict=True):
            metric = tc.Clustered(tc.ESCE(task="binary"))
            metric.update(each, labels, clusters=clusters)
            found.append(metric.test(n_replicates=N_REPLICATES).p_value)
        return torch.stack(found)
    if p.dim() == 2:
        metric = METRICS[test](task="binary", batch_shape=(len(p),))
        metric.update(p, (random(*p.shape, g=g) < q).long())
        return metric.test(n_replicates=N_REPLICATES).p_value
    y = (q.cumsum(-1) < random(*q.shape[:-1], 1, g=g)).sum(-1).clamp(max=N_CLASSES - 1)
    if name.startswith("top"):
        metric = METRICS[test](task="multiclass", num_classes=N_CLASSES, from_logits=True, batch_shape=(len(p),))
        metric.update(p, y)
        return metric.test(n_replicates=N_REPLICATES).p_value
    options = {"mode": "classwise", "average": None, "from_logits": True, "batch_shape": (len(p),)}
    metric = tc.ESCE(task="multiclass", num_classes=N_CLASSES, **options)
    metric.update(p, y)
    return holm(metric.test(n_replicates=2 * N_REPLICATES + 1).p_value)[:, 0]


def holm(p: Tensor) -> Tensor:
    """Return p-values `(D, C)` that are adjusted for C classes by Holm's method, as in the table of a report."""
    ascending, order = p.sort(-1)
    factors = torch.arange(p.shape[-1], 0, -1)
    return torch.empty_like(p).scatter(-1, order, (ascending * factors).cummax(-1).values.clamp(max=1))


def plan(name: str) -> tuple[int, str, float, float]:
    """Return the number of rows, its test, the size of the fault, and the design effect."""
    error, draw, given = SETTINGS[name]
    g = Generator().manual_seed(1)
    pilot = draw(2**15, g)
    given = dict(given)
    probs = pilot.softmax(-1) if pilot.dim() == 2 else pilot
    if name.startswith("one of"):
        given["preds"] = probs[:, 0]
    elif "spread" not in given:
        given["preds"] = probs
    if name.startswith("clusters"):
        given["design_effect"] = 1 + (CLUSTER - 1) * SHARED**2
    found = {test: tc.required_n(error, test=test, power=POWER, level=LEVEL, **given) for test in METRICS}
    test = "esce" if name.startswith(("one of", "clusters")) else min(found, key=found.__getitem__)
    x = size_of_fault(error, lambda x: of_event(name, pilot, true_of(name, pilot, x)), of_event(name, pilot, probs))
    return found[test], test, x, given.get("design_effect", 1.0)


def power(name: str, n_sets: int) -> list[str]:
    n, test, x, _ = plan(name)
    n = CLUSTER * math.ceil(n / CLUSTER) if name.startswith("clusters") else n
    g, found = Generator().manual_seed(2), []
    for d in batches(n_sets, AT_ONCE // n // (N_CLASSES if "binary" not in name else 1)):
        if name.startswith("clusters"):
            p = SETTINGS[name].draw(d * n // CLUSTER, g).repeat_interleave(CLUSTER).reshape(d, n)
        else:
            p = SETTINGS[name].draw(d * n, g)
            p = p.reshape(d, n, *p.shape[1:])
        found.append(p_values(name, p, true_of(name, p, x), test, g))
    return [f"{SETTINGS[name].error:+}", test.upper(), f"{n:,}", percent(torch.cat(found) <= LEVEL + 1e-9)]


STUDY = Study(
    "required_n",
    4_000,
    [
        Part([(name,) for name in SETTINGS], power, share=lambda cell: 0.5 if cell[0][0] in "oc" else 1),
        Part([(name,) for name in SCORES], of_two_systems),
    ],
)

if __name__ == "__main__":
    main(STUDY)

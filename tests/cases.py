"""Table of test cases: every metric with each of its settings."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import pytest
import torch
from oracles.input import modes_of

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.losses import mmce, soft_binned_ece

N_CLASSES = 4
COSTS = {  # more decisions than classes, a decision that costs something for every class, and a negative cost
    2: tc.CostMatrix([[0, 1, 0.2], [3, 0, 0.4]]),
    N_CLASSES: tc.CostMatrix([[0, 2, 1, 5, 0.3], [1, 0, 1, 1, 0.6], [1, 4, 0.1, 1, 0.3], [2, 1, 1, -0.5, 0.3]]),
}


def lead_of(preds, task):
    """Return the option that keeps all leading axes of `(..., N)` or `(..., N, C)` separate."""
    axes = preds.dim() - 1 - (task != "binary")
    return {"batch_dims": axes} if axes > 0 else {}


@dataclass(frozen=True)
class Case:
    """A metric with its settings: function, streaming class (None if there is none) and arguments."""

    name: str
    function: Callable
    cls: type | None
    task: str
    options: dict = field(default_factory=dict)
    own: dict = field(default_factory=dict)  # arguments of the class that the function does not take
    in_blocks: bool = False  # blocks of samples are formed in order within each update
    counts: bool = False  # targets are numbers of annotators, at least two for each sample

    def call(self, preds, target, **options):
        """Call the function, with all leading axes kept separate."""
        return self.function(preds, target, task=self.task, **self.options, **lead_of(preds, self.task), **options)

    def metric(self, **kwargs):
        return self.cls(task=self.task, **self.options, **self.own, **kwargs)

    @cached_property
    def example(self):
        """A metric whose properties are read, and which is never updated."""
        return self.metric()

    def data(self, n=40, lead=(), seed=0, dtype=torch.float64):
        """Return predictions and targets `(*lead, n[, C])`: logits if the case takes logits, else probabilities."""
        generator = torch.Generator().manual_seed(seed)
        shape = (*lead, n) if self.task == "binary" else (*lead, n, N_CLASSES)
        logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        high = N_CLASSES if self.task == "multiclass" else 2
        target_shape = shape if self.task == "multilabel" else (*lead, n)
        target = torch.randint(0, high, target_shape, generator=generator)
        if self.counts:
            target = torch.randint(0, 9, (*shape, *[2] * (self.task != "multiclass")), generator=generator)
            target[..., 0] += 2 * (target.sum(-1) < 2)
        if not self.options.get("from_logits"):
            logits = logits.softmax(-1) if self.task == "multiclass" else logits.sigmoid()
        return logits.to(dtype), target

    @property
    def format(self):
        """Input format of the case: its requirements of targets and weights."""
        return self.example.input_format

    @property
    def whole_weights(self):
        return self.format.whole_weights if self.cls else self.function in (F.skce, F.canonical_error)

    @property
    def differentiable(self):
        """Whether the gradient is that of the value. A median bandwidth is constant in the gradient."""
        return self.cls.is_differentiable if self.cls else self.options.get("bandwidth") != "median"

    def weights(self, n, seed=3):
        """Return random weights: counts if the case requires whole weights, else real numbers."""
        generator = torch.Generator().manual_seed(seed)
        w = torch.rand(n, generator=generator, dtype=torch.float64)
        return (5 * w).floor() if self.whole_weights else w

    def __str__(self):
        return self.name


OWN = {"multiclass": {"num_classes": N_CLASSES}, "multilabel": {"num_labels": N_CLASSES}, "binary": {}}
PRIORS = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
SCORES = [
    ("nll", F.nll, tc.NLL, {}),
    ("nce", F.nll, tc.NLL, {"normalize": "prior"}),
    ("nll-eps", F.nll, tc.NLL, {"eps": 0.05}),
    ("brier", F.brier_score, tc.BrierScore, {}),
    ("nbs", F.brier_score, tc.BrierScore, {"normalize": "prior"}),
    ("brier-classes", F.brier_score, tc.BrierScore, {"normalize": "classes"}),
    ("stratified-brier", F.stratified_brier_score, tc.StratifiedBrierScore, {}),
    ("ecd", F.ecd, tc.ECD, {}),
    ("risk", F.bayes_risk, tc.BayesRisk, {}),
    ("nrisk", F.bayes_risk, tc.BayesRisk, {"normalize": "prior"}),
    ("area", F.bayes_risk_area, tc.BayesRiskArea, {}),
    ("accuracy", F.accuracy, tc.Accuracy, {}),
    ("ranking", F.ranking_score, tc.RankingScore, {}),
]
BINNED = [
    ("ece", F.ece, tc.ECE, {"n_bins": 7}),
    ("esce", F.esce, tc.ESCE, {"n_bins": 7}),
    ("mce", F.mce, tc.MCE, {"n_bins": 7}),
    ("mean_bin_error", F.mean_bin_error, tc.MeanBinError, {"n_bins": 7}),
    ("rmsce", F.rmsce, tc.RMSCE, {"n_bins": 7}),
    ("ece-debiased", F.ece, tc.ECE, {"n_bins": 7, "debiased": True}),
    ("rmsce-debiased", F.rmsce, tc.RMSCE, {"n_bins": 7, "debiased": True}),
]
SELECTIVE = [
    ("aurc", F.aurc, tc.AURC, {}),
    ("eaurc", F.eaurc, tc.EAURC, {}),
    ("augrc", F.augrc, tc.AUGRC, {}),
    ("correctness_auroc", F.correctness_auroc, tc.CorrectnessAUROC, {}),
    ("risk_at_coverage", F.risk_at_coverage, tc.RiskAtCoverage, {"coverage": 0.6}),
    ("accuracy_at_coverage", F.accuracy_at_coverage, tc.AccuracyAtCoverage, {}),
    ("coverage_at_risk", F.coverage_at_risk, tc.CoverageAtRisk, {"risk": 0.3}),
]
ANNOTATOR_ERRORS = [
    ("tv", F.total_variation, tc.TotalVariation),
    ("kl", F.kl_divergence, tc.KLDivergence),
    ("entropy", F.entropy_gap, tc.EntropyGap),
    ("annotator_counts", F.squared_distance, tc.SquaredDistance),
]


def _case(name, function, cls, task, options, **more):
    return Case(name, function, cls, task, options, OWN[task], **more)


def _cases():
    for name, function, cls, options in SCORES:
        for task in OWN:
            # the first kind of input runs in every test run; the second may be left to the extended run
            for from_logits in (task == "multiclass", task != "multiclass"):
                kind = "logits" if from_logits else "probs"
                yield _case(f"{name}-{task}-{kind}", function, cls, task, {**options, "from_logits": from_logits})
    yield from _of_events(BINNED)
    for name, function, cls in (("ece", F.ece, tc.ECE), ("ace", F.ace, tc.ACE)):
        for mode in (tc.TopK(2), tc.TopK(3, only=True)):
            options = {"n_bins": 5, "mode": mode, "from_logits": True}
            which = f"{'only' if mode.only else 'top'}_{mode.k}"
            yield _case(f"{name}-multiclass-{which}", function, cls, "multiclass", options)
    for name, function, cls in ANNOTATOR_ERRORS:
        for task in OWN:
            yield _case(f"{name}-{task}", function, cls, task, {"from_logits": True})
        yield _case(f"{name}-multiclass-probs", function, cls, "multiclass", {})
        yield _case(f"{name}-floor-multiclass", function, cls, "multiclass", {"component": "noise_floor"})
    for name, function, cls, options in SCORES:
        if name in ("nll", "nce", "brier", "nbs", "ecd", "accuracy"):
            yield _case(f"{name}-priors", function, cls, "multiclass", {**options, "priors": PRIORS})
    for task in OWN:
        for name, normalize in (("risk", None), ("nrisk", "prior")):
            options = {"cost": COSTS[2 if task != "multiclass" else N_CLASSES], "normalize": normalize}
            yield _case(f"{name}-costs-{task}", F.bayes_risk, tc.BayesRisk, task, options)
            if task == "multiclass":
                options = {**options, "priors": PRIORS, "from_logits": True}
                yield _case(f"{name}-costs-priors", F.bayes_risk, tc.BayesRisk, task, options)
    options = {"cost": COSTS[2], "positive_classes": [1, 3], "from_logits": True}
    yield _case("risk-costs-set", F.bayes_risk, tc.BayesRisk, "multiclass", options)
    for name, function, cls in (("nll", F.nll, tc.NLL), ("ece", F.ece, tc.ECE)):
        yield _case(f"{name}-per-label", function, cls, "multilabel", {"average": None})
    yield from _ranked_cases()
    yield from _of_events(SELECTIVE)
    yield _case("aurc-top_2", F.aurc, tc.AURC, "multiclass", {"mode": tc.TopK(2), "from_logits": True})
    yield _case("aurc-per-label", F.aurc, tc.AURC, "multilabel", {"average": None})
    for task in OWN:
        for name, options in (
            ("skce-linear", {"from_logits": True}),
            ("skce-block", {"estimator": "block", "block_size": 5, "kernel": "gaussian", "bandwidth": 0.3}),
        ):
            yield _case(f"{name}-{task}", skce_in_blocks, tc.SKCE, task, options, in_blocks=True)
    yield from _binless_cases()
    per_class = {"average": None, "mode": "classwise"}
    # A search for the bandwidth of each class would be slow. tests/metrics/test_smooth.py searches those of labels.
    yield _case("smece-per-class", F.smece, tc.SmECE, "multiclass", {**per_class, "bandwidth": 0.2})
    yield _case("ece-per-class", F.ece, tc.ECE, "multiclass", per_class)


def _of_events(table):
    for name, function, cls, options in table:
        for task in OWN:
            for mode in modes_of(cls.__name__.lower(), task):
                given = {**options, "mode": mode, "from_logits": mode != "positive"}
                yield _case(f"{name}-{task}-{mode}", function, cls, task, given)


def _ranked_cases():
    yield from _of_events(
        [
            ("ace", F.ace, tc.ACE, {"n_bins": 5}),
            ("mce-mass", F.mce, tc.MCE, {"n_bins": 5, "bins": "equal_mass"}),
            ("tce", F.tce, tc.TCE, {"alpha": 0.3}),
            ("ks", F.ks, tc.KS, {}),
            ("atb", F.atb, tc.ATB, {}),
            ("corp", corp_part, tc.CORP, {"component": "mcb"}),
            ("cllr", F.cllr, tc.Cllr, {}),
        ]
    )
    for name, function, cls, options in (
        ("rmsce-mass", F.rmsce, tc.RMSCE, {"n_bins": 5, "bins": "equal_mass", "debiased": True}),
        ("mce-pava", F.mce, tc.MCE, {"bins": "pava"}),
        ("tce-mass-l2", F.tce, tc.TCE, {"bins": "equal_mass", "n_bins": 4, "norm": "l2", "alpha": 0.3}),
        ("tce-width-max", F.tce, tc.TCE, {"bins": "equal_width", "n_bins": 4, "norm": "max", "alpha": 0.3}),
        ("tce-edges", F.tce, tc.TCE, {"bins": (0.0, 0.3, 0.8, 1.0), "right": True, "alpha": 0.3}),
        ("tce-pava", F.tce, tc.TCE, {"bins": "pava", "alpha": 0.3}),
        ("tce-paper", F.tce, tc.TCE, {"variant": "paper", "alpha": 0.3}),
        ("tce-t", F.tce, tc.TCE, {"test": "t", "alpha": 0.3}),
        ("tce-function", F.tce, tc.TCE, {"test": z_test, "alpha": 0.3}),
        ("gce-l2", F.gce, tc.GCE, {"loss": squared_gap, "bins": "pava_bc", "norm": "l2"}),
        ("gce-max", F.gce, tc.GCE, {"loss": squared_gap, "bins": "equal_width", "norm": "max"}),
        ("estimation-mean", F.estimation_error, tc.EstimationError, {"distance": "huber", "norm": "mean"}),
        ("estimation-max", F.estimation_error, tc.EstimationError, {**ABSOLUTE, "bins": "equal_width", "norm": "max"}),
        ("estimation-l2", F.estimation_error, tc.EstimationError, {"distance": cubed, "bins": "pava", "norm": "l2"}),
        ("corp-nll", corp_part, tc.CORP, {"component": "mcb", "score": "nll", "from_logits": True}),
        ("corp-score", corp_part, tc.CORP, {"component": "score", "score": "nll"}),
        ("corp-dsc", corp_part, tc.CORP, {"component": "dsc"}),
        ("cllr-min", F.cllr, tc.Cllr, {"component": "min", "from_logits": True}),
        ("cllr-loss", F.cllr, tc.Cllr, {"component": "loss"}),
        ("corp-unc", corp_part, tc.CORP, {"component": "unc"}),
    ):
        yield _case(f"{name}-binary", function, cls, "binary", options)
    for name, function, cls in (("nll", F.nll, tc.NLL), ("ece", F.ece, tc.ECE), ("tce", F.tce, tc.TCE)):
        for from_logits in (False, True):
            options = {"positive_classes": [1, 3], "from_logits": from_logits}
            yield _case(f"{name}-set-{from_logits}", function, cls, "multiclass", options)
    yield _case("ks-per-class", F.ks, tc.KS, "multiclass", {"average": None, "mode": "classwise"})


def _binless_cases():
    for name, function, cls, options in (
        ("smece", F.smece, tc.SmECE, {}),
        ("spiegelhalter", F.spiegelhalter, tc.Spiegelhalter, {"component": "z"}),
        ("cox", cox_part, tc.Cox, {"component": "slope"}),
        ("sequential", sequential_log_e, tc.SequentialTest, {}),
        ("ici", F.ici, tc.ICI, {}),
    ):
        for task in OWN:
            # The search for a bandwidth per class is slow.
            width = {"bandwidth": 0.2} if name == "smece" and task != "binary" else {}
            yield _case(f"{name}-{task}", function, cls, task, {**options, **width, "from_logits": task != "binary"})
    for name, function, cls, options in (
        ("smece-wide", F.smece, tc.SmECE, {"bandwidth": 0.2}),
        ("smece-narrow", F.smece, tc.SmECE, {"bandwidth": 5 / 1024}),
        ("spiegelhalter-p", F.spiegelhalter, tc.Spiegelhalter, {"component": "p_value"}),
        ("cox-intercept", cox_part, tc.Cox, {"component": "intercept", "from_logits": True}),
        ("cox-in-the-large", cox_part, tc.Cox, {"component": "in_the_large", "eps": 0.01}),
        ("ici-e90", F.ici, tc.ICI, {"component": "e90", "span": 0.5, "degree": 1}),
        ("ici-emax", F.ici, tc.ICI, {"component": "emax", "n_points": 64}),
        ("ks-kuiper", F.ks, tc.KS, {"norm": "range"}),
    ):
        yield _case(f"{name}-binary", function, cls, "binary", options)
    yield _case("sequential-top_2", sequential_log_e, tc.SequentialTest, "multiclass", {"mode": tc.TopK(2)})
    yield _case("sequential-per-label", sequential_log_e, tc.SequentialTest, "multilabel", {"average": None})
    for name, function, cls in (("cox", cox_part, tc.Cox), ("spiegelhalter", F.spiegelhalter, tc.Spiegelhalter)):
        yield _case(f"{name}-per-class", function, cls, "multiclass", {"mode": "classwise"})


def skce_in_blocks(*args, estimator="linear", **options):
    return F.skce(*args, estimator=estimator, **options)


def part_of(function, default):
    """Return a function that returns one component of a result, like the streaming class."""

    def part(*args, component=default, **options):
        return getattr(function(*args, **options), component)

    return part


cox_part, corp_part = part_of(F.cox, "slope"), part_of(F.corp, "mcb")


def sequential_log_e(*args, **options):
    """Return the logarithm of the evidence, like the streaming class."""
    return F.sequential_test(*args, **options).log_e


def squared_gap(b):
    """A loss that depends on all three quantities of a bin."""
    return b.gap.square() / (1 + b.n)


ABSOLUTE = {"distance": "absolute", "n_bins": 4}


def cubed(outcome, probability):
    return (outcome - probability).abs() ** 3


def z_test(successes, n, probability):
    """Two-sided z-test, as a user may write it. A certain prediction is accepted only if all outcomes agree."""
    expected = n * probability
    z = (successes - expected).abs() / (expected * (1 - probability)).sqrt()
    return torch.erfc(z / 2**0.5).nan_to_num(1.0)


def _declared(known):
    """Yield cases with default options for metrics that no table contains."""
    public = [getattr(tc, name) for name in tc.__all__ if name[0].isupper()]
    for cls in public:
        if hasattr(cls, "function") and cls not in known:
            for task in OWN:
                yield _case(f"{cls.key}-{task}", cls.function, cls, task, {})


def _functions():
    """Yield functions without a streaming class: errors over all pairs of samples, and penalties for training."""
    settings = ("laplacian", "gaussian"), (0.4, "median"), ("unbiased", "biased")
    for k, (kernel, bandwidth, estimator) in enumerate(product(*settings)):
        task, options = list(OWN)[k % 3], {"kernel": kernel, "bandwidth": bandwidth, "estimator": estimator}
        options |= {"chunk": 5} if k % 2 else {}
        yield Case(f"skce-{kernel}-{bandwidth}-{estimator}", F.skce, None, task, options)
    options = {"bandwidth": 0.5, "from_logits": True}
    yield Case("skce-logits", F.skce, None, "multiclass", options)
    settings = ("binary", "multilabel", "multiclass"), ((1, 0.1), (2, 0.3), (1, "likelihood"))
    for k, (task, (p, bandwidth)) in enumerate(product(*settings)):
        options = {"p": p, "bandwidth": bandwidth, "chunk": 5, "from_logits": k % 2 == 1}
        yield Case(f"canonical-{task}-{p}-{bandwidth}", F.canonical_error, None, task, options)
    for name, function, options in PENALTIES:
        for task in OWN:
            for mode in modes_of(name, task):
                given = {**options, "mode": mode, "from_logits": mode != "top_label"}
                yield Case(f"{name}-{task}-{mode}", function, None, task, given)
        given = {**options, "mode": tc.TopK(2), "from_logits": True}
        yield Case(f"{name}-top_2", function, None, "multiclass", given)


PENALTIES = [
    ("soft_binned-l1", soft_binned_ece, {"n_bins": 7, "norm": "l1"}),
    ("soft_binned-l2", soft_binned_ece, {"temperature": 0.002}),
    ("mmce", mmce, {}),
    ("mmce-weighted", mmce, {"bandwidth": 0.05, "weighted": True}),
]


def _of_counts():
    """Yield distances to the labels of several annotators, and whether their classes have the same order."""
    components = ("value", "noise_floor", "corrected")
    for (name, function, cls), component, task in product(ANNOTATOR_ERRORS, components, OWN):
        for from_logits in (True, False) if (name, component) != ("tv", "corrected") else ():
            kind, options = ("logits" if from_logits else "probs"), {"component": component, "from_logits": from_logits}
            yield _case(f"{name}-{component}-counts-{task}-{kind}", function, cls, task, options, counts=True)
    for task in OWN:
        yield _case(
            f"ranking-counts-{task}", F.ranking_score, tc.RankingScore, task, {"from_logits": True}, counts=True
        )


def _options():
    """Yield settings whose values alone differ from those of other cases; loops have them with ties."""
    edges = (0.0, 0.125, 0.25, 0.75, 1.0)
    distances = [{"distance": "squared"}, ABSOLUTE, {"distance": "huber", "delta": 0.3}, {"distance": cubed}]
    for bins, (k, norm) in product(("pava_bc", "pava", "equal_mass", "equal_width", edges), enumerate(NORMS)):
        options = {"bins": bins, "n_bins": 5, "norm": norm}
        yield _case(f"tce-{bins}-{norm}", F.tce, tc.TCE, "binary", options)
        yield _case(f"gce-{bins}-{norm}", F.gce, tc.GCE, "binary", {**options, "loss": squared_gap})
        for step in (0, 1):
            more = {**options, **distances[(k + step) % 4]}
            yield _case(f"estimation-{bins}-{norm}-{step}", F.estimation_error, tc.EstimationError, "binary", more)
    decisions = {"alpha": 0.2}, {"alpha": 0.01}, {"test": "t"}, {"test": z_test}
    for binning, decision in product(
        (
            {"n_min": 3, "n_max": 9},
            {"n_min": 5, "n_max": 30, "variant": "paper"},
            {"n_min": 5, "n_max": 30, "ties": "split"},
            {"bins": "pava", "ties": "split"},
            {"bins": "equal_mass", "n_bins": 4, "ties": "split"},
            {"bins": "equal_width", "n_bins": 8, "right": True},
            {"bins": (0.0, 0.25, 0.5, 1.0), "right": True},
        ),
        decisions,
    ):
        yield _case(f"tce-{binning}-{decision}", F.tce, tc.TCE, "binary", binning | decision)
    yield _case("ace-split", F.ace, tc.ACE, "binary", {"n_bins": 7, "ties": "split"})
    for width in (*(k / 1024 for k in range(2, 13)), 0.0123, 0.049, 0.05, 0.3, 1.0):
        yield _case(f"smece-{width}", F.smece, tc.SmECE, "binary", {"bandwidth": width})
    for part in tc.inference.CoxCalibration._fields:
        yield _case(f"cox-{part}", cox_part, tc.Cox, "binary", {"component": part})
    for k, only in product(range(1, 5), (False, True)):
        mode = {"mode": tc.TopK(k, only), "n_bins": 5}
        yield _case(f"ece-top_{k}-{only}", F.ece, tc.ECE, "multiclass", mode)
        yield _case(f"ace-top_{k}-{only}", F.ace, tc.ACE, "multiclass", mode)


NORMS = ("l1", "l2", "max", "mean")
CASES = list(_cases())
CASES += _declared({case.cls for case in CASES})
CALLS = [*CASES, *_of_counts(), *_functions()]
"""Cases of `CASES`, and those that laws of streams do not have: counts of annotators, and functions without a class."""
OPTIONS = list(_options())
"""Cases that only have a loop."""


def covering(cases, keys, extended=str):
    """Yield cases that together cover all keys. Cases without a new key are marked `extended`.

    Args:
        cases: cases in order of preference.
        keys: function that returns the set of keys of a case.
        extended: function that returns the single key of a case in the extended run; by default every case differs.
    """
    seen, seen_at_length = set(), set()
    for case in cases:
        own, finer = keys(case), extended(case)
        if own <= seen and finer in seen_at_length:
            continue
        yield pytest.param(case, id=str(case), marks=[pytest.mark.extended] * (own <= seen))
        seen |= own
        seen_at_length.add(finer)


def path_of(case):
    """Return the key of a path from input to state. Batching, weights, merging and saving depend only on the path."""
    if case.cls is None:
        return case.function, case.task, case.options.get("mode")
    metric = case.example
    return type(metric.kind), type(getattr(metric, "accumulator", None)), case.task, case.options.get("mode")


def formula_of(case):
    """Return the key of a formula: the class and its options, without options of the input and of events."""
    shared = {"from_logits", "mode", "priors", "average", "positive_classes"}
    options = (f"{name}={value}" for name, value in sorted(case.options.items()) if name not in shared)
    return case.cls or case.function, *options


def kind_of(case):
    options = (f"{name}={case.options[name]}" for name in sorted(case.options) if name != "from_logits")
    return case.cls or case.function, case.task, *options


def is_order_independent(case):
    """Whether the value is independent of the row order. Metrics over blocks are not."""
    return not case.in_blocks


def differentiable(case):
    return case.differentiable


def has_reduction(case):
    """Whether a function may return the score of each sample."""
    relative = {"priors", "normalize"} & set(case.options)
    return "reduction" in inspect.signature(case.function).parameters and not relative


def paths(where=bool, cases=CASES):
    """Return parameters with one case per path; the extended run has one case per class and path."""
    some = filter(where, cases)
    return list(covering(some, lambda case: {path_of(case)}, lambda case: (case.cls, path_of(case))))


def formulas(where=bool, cases=CASES):
    """Return parameters with one case per formula; the extended run has one case per setting."""
    return list(covering(filter(where, cases), lambda case: {formula_of(case)}, kind_of))

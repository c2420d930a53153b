"""Random input gives the values of slow loops, or a documented error. For random calls see test_laws_of_states.py.

hypothesis draws the same input in every run: 80 examples, 200 in the extended run, and 4,000 with the marker `long`.
"""

import copy
import inspect
import math
import re

import pytest
import torch
from cases import ANNOTATOR_ERRORS, BINNED, CASES, COSTS, corp_part, sequential_log_e, squared_gap
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import input as slow

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.functional.scores import ScoreEstimator

QUICK = settings(max_examples=80, suppress_health_check=list(HealthCheck))  # in addition to the profile in conftest
MORE = [
    pytest.param(settings(QUICK, max_examples=n), marks=getattr(pytest.mark, mark), id=mark)
    for n, mark in ((200, "extended"), (4000, "long"))
]

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LABELS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]
DOCUMENTED_ERROR = re.compile(r"(`[\w.-]+`|the saved state) must .+, got .+", re.DOTALL)
PRIORS = {"priors": [None, True]}
N_BINS = {"n_bins": [1, 2, 3, 5, 10, 15, 64]}
WIDE = {**N_BINS, "right": [False, True]}
ANY = {**WIDE, "bins": ["equal_width", "equal_mass", "pava", (0.0, 0.3, 0.8, 1.0)]}
NORMED = {**ANY, "norm": ["l1", "l2", "max", "mean"], "bins": [*ANY["bins"], "pava_bc"]}


def binned_options(function):
    """Return the values to try for each option of a binned calibration error."""
    taken = inspect.signature(function).parameters
    options = ANY if "bins" in taken else WIDE
    return {**options, "debiased": [False, True]} if "debiased" in taken else options


KINDS = [
    (F.nll, tc.NLL, {"eps": [None, 0.05], "normalize": [None, "prior"], **PRIORS}),
    (F.brier_score, tc.BrierScore, {"normalize": [None, "prior", "classes"], **PRIORS}),
    (F.stratified_brier_score, tc.StratifiedBrierScore, {}),
    (F.ecd, tc.ECD, PRIORS),
    (F.bayes_risk_area, tc.BayesRiskArea, {"normalize": [None, "prior"], **PRIORS}),
    (F.accuracy, tc.Accuracy, PRIORS),
    *((function, cls, {}) for _, function, cls in ANNOTATOR_ERRORS),
    (F.ranking_score, tc.RankingScore, {}),
    (F.bayes_risk, tc.BayesRisk, {"cost": [None, True], "normalize": [None, "prior"], **PRIORS}),
    *((function, cls, binned_options(function)) for name, function, cls, _ in BINNED if not name.endswith("-debiased")),
    (F.ace, tc.ACE, N_BINS),
    (F.ks, tc.KS, {}),
    (F.atb, tc.ATB, {}),
    (corp_part, tc.CORP, {"score": ["brier", "nll"], "component": ["score", "mcb", "dsc", "unc"]}),
    (F.cllr, tc.Cllr, {"component": ["value", "min", "loss"]}),
    (F.tce, tc.TCE, {**NORMED, "alpha": [0.05, 0.3]}),
    (F.gce, tc.GCE, {**NORMED, "loss": [squared_gap]}),
    (F.estimation_error, tc.EstimationError, {**NORMED, "distance": ["squared", "absolute", "huber"]}),
    (sequential_log_e, tc.SequentialTest, {}),
    (F.aurc, tc.AURC, {}),
    (F.eaurc, tc.EAURC, {}),
    (F.augrc, tc.AUGRC, {}),
    (F.correctness_auroc, tc.CorrectnessAUROC, {}),
    (F.risk_at_coverage, tc.RiskAtCoverage, {"coverage": [0.8, 0.3, 1.0]}),
    (F.accuracy_at_coverage, tc.AccuracyAtCoverage, {"coverage": [0.8, 0.3, 1.0]}),
    (F.coverage_at_risk, tc.CoverageAtRisk, {"risk": [0.05, 0.0, 0.5]}),
]


def one_in(draw, n):
    return draw(st.integers(1, n)) == n


def tensor_of(draw, values, n, *shape):
    """Return a float64 tensor of n drawn values, each a number or a list of numbers."""
    return torch.tensor(draw(st.lists(values, min_size=n, max_size=n)), dtype=torch.float64).reshape(shape)


def with_bad_value(draw, tensor, values):
    """Replace an entry by a bad value in 1 of 15 tensors."""
    if tensor.numel() and one_in(draw, 15):
        tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = draw(st.sampled_from(values))
    return tensor


def probability(n_bins):
    """Return a strategy for probabilities with edge cases: bin edges and their neighbours, signed zeros, subnormals."""
    edges = [i / n_bins for i in range(n_bins + 1)]
    near = [math.nextafter(e, to) for e in edges for to in (0, 1)]
    return st.sampled_from([*edges, *near, -0.0, 5e-324, 1e-45, 1e-7, 1 - 1e-7, 0.5]) | st.floats(0, 1)


def logit():
    extremes = [0.0, -0.0, 1e-300, 30.0, -30.0, 710.0, -710.0, 6e4, -6e4, math.inf, -math.inf]
    return st.sampled_from(extremes) | st.floats(-8, 8)


def class_row(n_classes, n_bins):
    """Return a strategy for rows that sum to 1: annotator frequencies, a pair at a bin edge, and uniform rows."""
    annotator_counts = st.lists(st.integers(0, 5), min_size=n_classes, max_size=n_classes).filter(any)
    shares = annotator_counts.map(lambda row: [n / sum(row) for n in row])
    edge = probability(n_bins).map(lambda p: [p, 1 - p, *[0.0] * (n_classes - 2)])
    return shares | edge | st.just([1 / n_classes] * n_classes)


def drawn_settings(draw, options, cls, task, n_classes):
    chosen = {name: draw(st.sampled_from(values)) for name, values in options.items()}
    reading = {"from_logits": draw(st.booleans())}
    if task == "multiclass" and one_in(draw, 5):
        classes = st.lists(st.integers(0, n_classes - 1), min_size=1, max_size=n_classes - 1, unique=True)
        reading["positive_classes"] = draw(classes)
    read_as = "binary" if "positive_classes" in reading else task
    n_read = n_classes if read_as == "multiclass" else 2
    if chosen.get("priors"):
        chosen["priors"] = [0.25, 0.75, 0.0, 0.0][:n_read]
    if chosen.get("cost"):
        rows = [[0, 2, 1, 5][:n_read]] * (n_read - 1) + [[1] * n_read]
        chosen["cost"] = COSTS[2] if n_read == 2 else tc.CostMatrix(rows)
    if cls.__name__.lower() not in slow.SCORES:
        chosen["mode"] = draw(st.sampled_from(slow.modes_of(cls.__name__.lower(), read_as)))
    if read_as == "multilabel" or chosen.get("mode") == "classwise":
        chosen["average"] = draw(st.sampled_from(["macro", None]))
    return chosen, reading


def drawn_preds(draw, task, from_logits, n_bins, n, n_classes):
    values, bad = probability(n_bins), [math.nan, math.inf, -math.inf, 1 + 1e-2, -1e-6]
    if task == "multiclass" and not from_logits:
        return with_bad_value(draw, tensor_of(draw, class_row(n_classes, n_bins), n, n, n_classes), [*bad, 0.7])
    values, bad = (logit(), [math.nan]) if from_logits else (values, bad)
    return with_bad_value(draw, tensor_of(draw, values, n * n_classes, n, n_classes), bad)


def drawn_target(draw, kind, task, ignore_index, n, n_classes):
    """Draw labels, some with the ignored index; soft labels; or annotator counts, which have an additional axis."""
    if kind == "annotator_counts":
        shape = (n, n_classes) if task == "multiclass" else (n, n_classes, 2)
        counts = tensor_of(draw, st.integers(0, 5), math.prod(shape), *shape).long()
        counts[..., 0] += counts.sum(-1) == 0
        return with_bad_value(draw, counts, [-1, 0, 2**54, 40])
    if kind == "soft":
        share = st.sampled_from([0.0, 1.0, 0.5, 0.25, -0.0]) | st.floats(0, 1)
        values, size = (class_row(n_classes, 2), n) if task == "multiclass" else (share, n * n_classes)
        target = with_bad_value(draw, tensor_of(draw, values, size, n, n_classes), [math.nan, 1.5, -0.5])
        return target.to(draw(st.sampled_from(FLOATS)))
    high, shape = (n_classes, (n,)) if task == "multiclass" else (2, (n, n_classes))
    target = tensor_of(draw, st.integers(0, high - 1), math.prod(shape), *shape).long()
    target = with_bad_value(draw, target, [high, -1, 100])
    if target.numel() and ignore_index is not None:
        target.view(-1)[draw(st.lists(st.integers(0, target.numel() - 1), max_size=4))] = ignore_index
    return target


def in_narrow_dtype(draw, tensor, dtypes):
    """Convert to one of these dtypes if it represents all values exactly."""
    narrow = tensor.to(draw(st.sampled_from(dtypes)))
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


@st.composite
def calls(draw):
    """Draw a call of a function and of its metric. Some calls are invalid."""
    function, cls, options = draw(st.sampled_from(KINDS))
    task = draw(st.sampled_from(list(slow.MODES)))
    lead = draw(st.sampled_from([(), (), (), (2,), (1, 2), (0,)]))
    n = draw(st.integers(0, 7))
    n_classes = draw({"binary": st.just(1), "multiclass": st.integers(2, 4), "multilabel": st.integers(1, 3)}[task])
    own = {"multiclass": {"num_classes": n_classes}, "multilabel": {"num_labels": n_classes}, "binary": {}}[task]
    chosen, reading = drawn_settings(draw, options, cls, task, n_classes)

    # Samples on one axis, classes last
    rows = math.prod(lead) * n
    preds = drawn_preds(draw, task, reading["from_logits"], chosen.get("n_bins", 3), rows, n_classes)
    hard = (
        cls in (tc.TCE, tc.CORP, tc.StratifiedBrierScore, tc.Cllr)
        or cls.__name__.lower() in slow.SELECTIVE
        or chosen.get("priors")
    )
    kind = draw(st.sampled_from(["labels"] * (14 if hard else 4) + ["soft", "annotator_counts"]))
    if one_in(draw, 16 if kind == "soft" else 4):
        reading["ignore_index"] = draw(st.sampled_from([-100, 0, 1, 99]))
    target = drawn_target(draw, kind, task, reading.get("ignore_index"), rows, n_classes)
    target = target if kind == "soft" else in_narrow_dtype(draw, target, LABELS if kind == "labels" else LABELS[:-1])
    weights = None
    if draw(st.booleans()):
        whole = [0.0, 1.0, 2.0, 3.0, 1e6]
        some = draw(st.sampled_from([whole, whole, [0.0, 0.5, 1.7, 1e150, 1e-150, 1e-3]]))
        weights = tensor_of(draw, st.sampled_from(some), rows, *lead, n)
        weights = with_bad_value(draw, weights, [-1.0, math.nan, math.inf, 1e200, 0.5])
        weights = in_narrow_dtype(draw, weights, [torch.float64, torch.float32, torch.int64, torch.uint8])

    # Reshape to the drawn batch shape and class axis.
    is_binary = task == "binary"
    preds = preds.to(draw(st.sampled_from(FLOATS))).reshape(*lead, n, *preds.shape[1 + is_binary :])
    target = target.reshape(*lead, n, *target.shape[1 + is_binary :])
    call = slow.Call(function, cls, task, n_classes, chosen, reading, preds, target, weights, lead, own)
    if not is_binary and one_in(draw, 4):
        axis = draw(st.integers(-len(lead) - 2, len(lead) + 1))
        call.preds, reading["class_axis"] = preds.movedim(-1, axis), axis
        if target.dim() >= preds.dim():
            call.target = target.movedim(len(lead) + 1, axis % preds.dim())
    if one_in(draw, 20):
        malform(draw, call)
    return call


def malform(draw, call):
    """Replace an argument of a call by one with a wrong type or shape."""
    longer = torch.cat([call.target, call.target.new_zeros(1, *call.target.shape[1:])])
    integers, complex_numbers = call.preds.nan_to_num(0, 0, 0).long(), call.preds.to(torch.complex64)
    wrong = [("preds", value) for value in (integers, complex_numbers, ["0.5"], torch.full((7, 6, 5), 0.5))]
    wrong += [("target", longer), ("target", None), ("weights", torch.ones(len(call.target) + 1)), ("weights", 1.0)]
    name, value = wrong[draw(st.integers(0, len(wrong) - 1))]
    call.malformed = f"{name}: {value}"
    setattr(call, name, value)


def outcome(call, *metrics):
    """Return the value or a documented error, and check that an error changes no metric. Other errors are raised."""
    before = [copy.deepcopy(metric.metric_state) for metric in metrics], [metric.update_count for metric in metrics]
    try:
        return call()
    except (TypeError, ValueError) as error:
        if not DOCUMENTED_ERROR.match(str(error)):
            raise
        states = [metric.metric_state for metric in metrics]
        torch.testing.assert_close(states, before[0], rtol=0, atol=0, equal_nan=True)
        assert [metric.update_count for metric in metrics] == before[1]
        return error


def close(found, value, size, call):
    """Compare with a tolerance relative to the summed terms: 1e-11 for float64, 2e-5 for dtypes with float32 rows."""
    value, found = value.to(found.dtype).double(), found.double()  # float32 cannot represent numbers above 3e38
    tolerance = 1e-11 if call.preds.dtype == torch.float64 else 2e-5
    if call.metric == "rmsce":  # the square root magnifies rounding of small numbers
        found, value = found.square(), value.square()
    torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def updated(metric, call):
    """Update a metric. If the target identifies the class axis, the samples get an additional axis of length 1."""
    preds, target, weights = call.preds, call.target, call.weights
    is_known = not call.malformed and (
        call.task == "binary" or (call.task == "multiclass" and target.dim() == 1 and len(set(preds.shape)) == 2)
    )
    if not call.lead and "class_axis" not in call.reading and is_known:
        preds, target = preds.expand(1, *preds.shape), target.expand(1, *target.shape)
        weights = None if weights is None else weights.expand(1, *weights.shape)
    metric.update(preds, target, weights=weights)
    return metric


def value_or_error(call):
    """Check that function and class return the value of the loops, or that both raise an error and change nothing."""
    results = [outcome(call.value)]
    if 0 not in call.lead:  # a class cannot have an empty batch shape
        metric = call.streaming(call.lead)
        found = outcome(lambda: updated(metric, call), metric)
        results.append(found if isinstance(found, Exception) else metric.compute())
    why, value, size = None, None, None  # None if rounding decides the value
    try:
        value, size = slow.expected(call)
    except slow.Illegal as illegal:
        why = str(illegal)
    except slow.Undecided:
        pass
    refused = [isinstance(result, Exception) for result in results]
    if why or any(refused):
        assert all(refused), f"{why}: {results}"
        assert why or value is None, f"refused: {results}"
        return
    assert results[0].dtype == torch.promote_types(call.preds.dtype, torch.float32)
    torch.testing.assert_close(results[-1].to(results[0].dtype), results[0], equal_nan=True)
    for result in results if value is not None else ():
        close(result, value, size, call)


def test_every_score_is_called():
    scores = {case.cls for case in CASES if isinstance(case.metric().estimator, ScoreEstimator)}
    assert scores <= {cls for _, cls, _ in KINDS}


@pytest.mark.parametrize("profile", [QUICK, *MORE])
def test_random_calls_give_the_values_of_slow_loops_or_a_documented_error(profile):
    profile(given(calls())(value_or_error))()

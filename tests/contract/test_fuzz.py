"""Whatever comes in, in whatever order: the value of the slow loops, or an error that says what must hold.

Input is drawn by hypothesis, the same in every run. The long profile (marker `long`) draws 8,000 examples.
"""

import math
import pickle
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import CASES, COSTS, Case, corp_part, squared_gap
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import input as slow

import torchcalib as tc

QUICK = settings(
    max_examples=200,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
LONG = settings(QUICK, max_examples=4000)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LABELS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
EDGES = (0.0, 0.3, 0.8, 1.0)
HOUSE = re.compile(r"(`[\w.-]+`|the saved state) must .+, got .+", re.DOTALL)
SCORES = {
    "nll": (tc.nll, tc.NLL, {"eps": [None, 0.05], "normalize": [None, "prior"], "priors": [None, True]}),
    "brier": (tc.brier_score, tc.Brier, {"normalize": [None, "prior", "classes"], "priors": [None, True]}),
    "ecd": (tc.ecd, tc.ECD, {"priors": [None, True]}),
    "accuracy": (tc.accuracy, tc.Accuracy, {"priors": [None, True]}),
    "tv": (tc.total_variation, tc.TotalVariation, {}),
    "kl": (tc.kl_divergence, tc.KLDivergence, {}),
    "entropy": (tc.entropy_difference, tc.EntropyDifference, {}),
    "votes": (tc.votes_distance, tc.VotesDistance, {}),
    "risk": (tc.bayes_risk, tc.BayesRisk, {"cost": [None, True], "normalize": [None, "prior"], "priors": [None, True]}),
}
N_BINS = {"n_bins": [1, 2, 3, 5, 10, 15, 64]}
NORM = {"norm": ["l1", "l2", "max"]}
WIDE = {**N_BINS, "right": [False, True]}
ANY = {**WIDE, "bins": ["equal_width", "equal_mass", "pava", EDGES]}
ERRORS = {
    "ece": (tc.ece, tc.ECE, WIDE),
    "esce": (tc.esce, tc.ESCE, WIDE),
    "mce": (tc.mce, tc.MCE, ANY),
    "rmsce": (tc.rmsce, tc.RMSCE, {**ANY, "debiased": [False, True]}),
    "ace": (tc.ace, tc.ACE, N_BINS),
    "ks": (tc.ks, tc.KS, {}),
    "corp": (corp_part, tc.CORP, {"score": ["brier", "nll"], "component": ["score", "mcb", "dsc", "unc"]}),
    "tce": (tc.tce, tc.TCE, {**ANY, **NORM, "bins": [*ANY["bins"], "pava_bc"], "alpha": [0.05, 0.3]}),
    "gce": (tc.gce, tc.GCE, {**ANY, **NORM, "loss": [squared_gap], "bins": [*ANY["bins"], "pava_bc"]}),
}
KINDS = {**SCORES, **ERRORS}
REDUCTIONS = {
    "binary": ["positive_class", "top_label"],
    "multiclass": ["top_label", "classwise"],
    "multilabel": ["classwise"],
}


@dataclass
class Input:
    """A call: a metric, its settings, and what it is given."""

    metric: str
    task: str
    n_outputs: int
    settings: dict[str, Any]  # of the metric
    reading: dict[str, Any]  # of input, but weights
    lead: tuple[int, ...]
    preds: Any
    target: Any
    weights: Any
    malformed: str | None = None
    own: dict[str, Any] = field(default_factory=dict)

    def function(self):
        call = KINDS[self.metric][0]
        return call(self.preds, self.target, task=self.task, weights=self.weights, **self.settings, **self.reading)

    def streaming(self, batch_shape=()):
        given = {"task": self.task, **self.settings, **self.reading, **self.own}
        return KINDS[self.metric][1](**given, batch_shape=batch_shape)

    def update(self, metric):
        """Give a metric the batch; where nothing says which axis is which, the samples as an axis of several."""
        given = self.preds, self.target, self.weights
        if not self.lead and "class_axis" not in self.reading and not self.malformed:
            given = [t if t is None else t.unsqueeze(0).expand(1, *t.shape) for t in given]
        metric.update(*given[:2], weights=given[2])


def choose(draw, options):
    """Draw a value for each option."""
    return {name: draw(st.sampled_from(values)) for name, values in options.items()}


def probability(n_bins):
    """Probabilities where something may go wrong: edges of bins and what is next to them, signed zeros, subnormals."""
    edges = [i / n_bins for i in range(n_bins + 1)]
    near = [math.nextafter(e, to) for e in edges for to in (0, 1)]
    return st.sampled_from([*edges, *near, -0.0, 5e-324, 1e-45, 1e-7, 1 - 1e-7, 0.5]) | st.floats(0, 1)


def logit():
    extremes = [0.0, -0.0, 1e-300, 30.0, -30.0, 710.0, -710.0, 6e4, -6e4, math.inf, -math.inf]
    return st.sampled_from(extremes) | st.floats(-8, 8)


def class_rows(draw, n, n_classes, n_bins):
    """Rows that sum to 1: shares of whole votes, pairs at an edge, and numbers that float64 rounds."""
    rows = []
    for _ in range(n):
        kind = draw(st.sampled_from(["votes", "edge", "even"]))
        if kind == "votes":
            votes = draw(st.lists(st.integers(0, 5), min_size=n_classes, max_size=n_classes))
            votes[draw(st.integers(0, n_classes - 1))] += 1
            rows.append([vote / sum(votes) for vote in votes])
        elif kind == "edge":
            p = draw(probability(n_bins))
            rows.append([p, 1 - p, *[0.0] * (n_classes - 2)])
        else:
            rows.append([1 / n_classes] * n_classes)
    return torch.tensor(rows, dtype=torch.float64).reshape(n, n_classes)


def spoiled(draw, tensor, values):
    """Put a bad value somewhere, now and then."""
    if tensor.numel() and draw(st.integers(0, 14)) == 0:
        tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = draw(st.sampled_from(values))
    return tensor


@st.composite
def inputs(draw):
    """A call of a function or of a metric; one in a few is bad."""
    metric = draw(st.sampled_from(list(KINDS)))
    task = draw(st.sampled_from(list(REDUCTIONS)))
    dtype = draw(st.sampled_from(FLOATS))
    lead = draw(st.sampled_from([(), (), (), (2,), (1, 2), (0,)]))
    n = draw(st.integers(0, 7))
    n_classes = draw(st.integers(2, 4)) if task == "multiclass" else draw(st.integers(1, 3))
    own = {"multiclass": {"num_classes": n_classes}, "multilabel": {"num_labels": n_classes}, "binary": {}}[task]
    chosen = choose(draw, KINDS[metric][2])
    reading = {"from_logits": draw(st.booleans())}
    if task == "multiclass" and draw(st.integers(0, 4)) == 0:
        reading["positive_classes"] = draw(
            st.lists(st.integers(0, n_classes - 1), min_size=1, max_size=n_classes - 1, unique=True)
        )
    read_as = "binary" if "positive_classes" in reading else task
    n_read = n_classes if read_as == "multiclass" else 2
    if chosen.get("priors"):
        chosen["priors"] = [0.25, 0.75, 0.0, 0.0][:n_read]
    if chosen.get("cost"):
        chosen["cost"] = (
            COSTS[2] if n_read == 2 else tc.CostMatrix([[0, 2, 1, 5][:n_read]] * (n_read - 1) + [[1] * n_read])
        )
    if metric in ERRORS:
        chosen["reduction"] = draw(st.sampled_from(REDUCTIONS[read_as]))
    if read_as == "multilabel" or chosen.get("reduction") == "classwise":
        chosen["average"] = draw(st.sampled_from(["macro", None]))

    # Predictions and targets, samples in one axis, classes last.
    n_bins, rows = chosen.get("n_bins", 3), math.prod(lead) * n
    if reading["from_logits"]:
        numbers = draw(st.lists(logit(), min_size=rows * n_classes, max_size=rows * n_classes))
        preds = torch.tensor(numbers, dtype=torch.float64).reshape(rows, n_classes)
        preds = spoiled(draw, preds, [math.nan])
    elif task == "multiclass":
        preds = spoiled(draw, class_rows(draw, rows, n_classes, n_bins), [math.nan, math.inf, 1 + 1e-2, -1e-6, 0.7])
    else:
        numbers = draw(st.lists(probability(n_bins), min_size=rows * n_classes, max_size=rows * n_classes))
        preds = torch.tensor(numbers, dtype=torch.float64).reshape(rows, n_classes)
        preds = spoiled(draw, preds, [math.nan, math.inf, -math.inf, 1 + 1e-2, -1e-6])
    soft = draw(st.integers(0, 3 if metric not in ("tce", "corp") and not chosen.get("priors") else 15)) == 0
    voted = not soft and "priors" not in reading and draw(st.integers(0, 7)) == 0
    if voted:
        shape = preds.shape if task == "multiclass" else (*preds.shape, 2)
        counts = draw(st.lists(st.integers(0, 5), min_size=math.prod(shape), max_size=math.prod(shape)))
        counts = torch.tensor(counts, dtype=torch.int64).reshape(shape)
        counts[..., 0] += counts.sum(-1) == 0
        target = spoiled(draw, counts, [-1, 0, 2**54, 40])
    elif soft and task == "multiclass":
        target = spoiled(draw, class_rows(draw, rows, n_classes, 2), [math.nan, 1.5, -0.5])
    elif soft:
        shares = draw(
            st.lists(
                st.sampled_from([0.0, 1.0, 0.5, 0.25, -0.0]) | st.floats(0, 1),
                min_size=preds.numel(),
                max_size=preds.numel(),
            )
        )
        target = spoiled(draw, torch.tensor(shares, dtype=torch.float64).reshape(preds.shape), [math.nan, 1.5, -0.5])
    else:
        high = n_classes if task == "multiclass" else 2
        shape = (rows,) if task == "multiclass" else preds.shape
        labels = draw(st.lists(st.integers(0, high - 1), min_size=math.prod(shape), max_size=math.prod(shape)))
        target = spoiled(draw, torch.tensor(labels, dtype=torch.int64).reshape(shape), [high, -1, 100])
    if draw(st.integers(0, 3 if not soft else 15)) == 0:
        reading["ignore_index"] = draw(st.sampled_from([-100, 0, 1, 99]))
        if target.numel() and not (soft or voted):
            marked = draw(st.lists(st.integers(0, target.numel() - 1), max_size=4))
            target.view(-1)[marked] = reading["ignore_index"]
    if soft:
        target = target.to(draw(st.sampled_from(FLOATS)))
    else:
        narrow = draw(
            st.sampled_from(
                [*LABELS, *([torch.bool] if target.numel() and target.min() >= 0 and target.max() <= 1 else [])]
            )
        )
        target = target.to(narrow if bool((target.to(narrow).long() == target).all()) else torch.int64)
    preds = preds.to(dtype)
    weights = None
    if draw(st.booleans()):
        whole = st.sampled_from([0.0, 1.0, 2.0, 3.0, 1e6])
        some = draw(st.sampled_from([whole, whole, st.sampled_from([0.0, 0.5, 1.7, 1e150, 1e-150, 1e-3])]))
        weights = torch.tensor(draw(st.lists(some, min_size=rows, max_size=rows)), dtype=torch.float64)
        weights = spoiled(draw, weights, [-1.0, math.nan, math.inf, 1e200, 0.5])
        narrow = draw(st.sampled_from([torch.float64, torch.float32, torch.int64, torch.uint8]))
        weights = weights.to(narrow) if torch.equal(weights.to(narrow).double(), weights) else weights

    # Shapes as they are given.
    if task == "binary":
        preds = preds[:, 0] if n_classes == 1 else preds.flatten()[:rows]
        target = target.reshape(-1, 2)[:rows] if voted else target.flatten()[:rows]
    classes = () if task == "binary" else (n_classes,)
    preds = preds.reshape(*lead, n, *classes)
    with_classes = task == "multilabel" or ((soft or voted) and task == "multiclass")
    of_row = (*(classes if with_classes else ()), *((2,) if voted and task != "multiclass" else ()))
    target = target.reshape(*lead, n, *of_row)
    weights = None if weights is None else weights.reshape(*lead, n)
    call = Input(metric, task, n_classes, chosen, reading, lead, preds, target, weights, own=own)
    if task != "binary" and draw(st.integers(0, 3)) == 0:
        axis = draw(st.integers(-len(lead) - 2, len(lead) + 1))
        call.preds, reading["class_axis"] = preds.movedim(-1, axis), axis
        if target.shape == preds.shape and (soft or voted or task == "multilabel"):
            call.target = target.movedim(-1, axis)
        elif voted:
            call.target = target.movedim(-2, axis % preds.dim())
    if draw(st.integers(0, 19)) == 0:
        malform(draw, call)
    return call


def malform(draw, call):
    """Make of a call one that is refused for its types or shapes."""
    wrongs = {
        "preds of whole numbers": {"preds": call.preds.nan_to_num(0, 0, 0).long()},
        "preds complex": {"preds": call.preds.to(torch.complex64)},
        "preds a list": {"preds": call.preds.tolist()},
        "preds a scalar": {"preds": torch.tensor(0.5)},
        "target longer": {
            "target": torch.cat([call.target, call.target[..., :1].new_zeros(1, *call.target.shape[1:])])
        },
        "target None": {"target": None},
        "weights longer": {"weights": torch.ones(len(call.target) + 1)},
        "weights a number": {"weights": 1.0},
    }
    call.malformed = draw(st.sampled_from(list(wrongs)))
    for name, value in wrongs[call.malformed].items():
        setattr(call, name, value)


def expected(call):
    """The value by the slow loops, and the size of what it is a sum of, which rounding is relative to."""
    if call.malformed:
        raise slow.Illegal(call.malformed)
    how = call.streaming().input_format
    reading = {"ignore_index": None, "positive_classes": None, **call.reading}
    axis = reading.pop("class_axis", -1)
    preds, target, n_series = call.preds, call.target, math.prod(call.lead)
    if call.task != "binary":
        preds = preds.movedim(axis, -1)
        n_axes = preds.dim()
        target = target.movedim(axis % n_axes, n_axes - 1) if target.dim() >= n_axes else target
    target = slow.shares(target, preds.shape, call.task, how.hard_targets, reading["ignore_index"])
    if target.is_floating_point() and call.task == "multiclass" and reading["ignore_index"] is not None:
        raise slow.Illegal("soft and ignored")
    if target.is_floating_point() and how.hard_targets:
        raise slow.Illegal("soft where labels are counted")
    apart = call.settings.get("reduction") == "classwise" or call.task == "multilabel"
    averaged = not apart or call.settings.get("average") is not None
    values, size = [], 1.0
    for k in range(n_series):
        series = [
            t if t is None else t.reshape(n_series, *t.shape[len(call.lead) :])[k]
            for t in (preds, target, call.weights)
        ]
        columns = slow.series(*series, call.task, whole=how.whole_weights, **reading)
        found = [pair for rows in columns for pair in values_of(call, rows)]
        size = max(size, *(s for _, s in found if math.isfinite(s)), 0)
        of_columns = [value for value, _ in found]
        values.append(sum(of_columns) / len(of_columns) if averaged else of_columns)
    shape = call.lead if averaged else (*call.lead, call.n_outputs)
    return torch.tensor(values, dtype=torch.float64).reshape(shape), size


def values_of(call, rows):
    """Value and size of one series: one pair, or one for each class."""
    read_as = "binary" if "positive_classes" in call.reading else call.task
    binary = read_as != "multiclass"
    if call.metric in SCORES:
        options = dict(call.settings)
        if options.get("cost") is not None:
            options["cost"] = options["cost"].costs
        return [slow.score_value(call.metric, rows, options, binary, 2 if binary else call.n_outputs)]
    reduction = "positive_class" if read_as == "multilabel" else call.settings["reduction"]
    columns = slow.events(rows, "binary" if binary else read_as, reduction)
    columns = columns or [[]] * (call.n_outputs if reduction == "classwise" else 1)
    guard = 1e-12 if call.preds.dtype == torch.float64 else 1e-5
    size = 100.0 if call.metric == "tce" else 1.0
    return [(slow.event_value(call.metric, column, call.settings, guard), size) for column in columns]


def expected_or_why_not(call):
    """Why the call must be refused, or None; then value and size, None where rounding decides."""
    try:
        return None, *expected(call)
    except slow.Illegal as why:
        return str(why), None, None
    except slow.Undecided:
        return None, None, None


def close(found, value, size, call):
    """Within 1e-11 of what the value is a sum of for float64, and 2e-5 for narrower types, whose rows are float32."""
    value, found = value.to(found.dtype).double(), found.double()  # float32 has no number above 3e38
    tolerance = 1e-11 if call.preds.dtype == torch.float64 else 2e-5
    if call.metric == "rmsce":  # the root of a small number that rounding moves
        found, value = found.square(), value.square()
    torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def outcome(call):
    """The value, or an error that is documented; any other comes through."""
    try:
        return call()
    except (TypeError, ValueError) as error:
        if HOUSE.match(str(error)):
            return error
        raise


def value_or_error(call):
    """Function and class give what the slow loops give, or refuse what the rules do; a refused update does nothing."""
    results = [outcome(call.function)]
    if 0 not in call.lead:  # a class has no series of none
        metric = call.streaming(call.lead)
        before = state_of(metric)
        refused = outcome(lambda: call.update(metric))
        results.append(metric.compute() if refused is None else refused)
        if isinstance(results[1], Exception):
            assert_same_state(state_of(metric), before)
            assert metric.update_count == 0
    why, value, size = expected_or_why_not(call)
    refused = [isinstance(result, Exception) for result in results]
    if why or any(refused):
        assert all(refused), f"{why}: {results}"
        assert why or value is None, f"refused: {results}"
        return
    function, *streamed = results
    assert function.dtype == torch.promote_types(call.preds.dtype, torch.float32)
    for result in streamed:
        torch.testing.assert_close(result.to(function.dtype), function, equal_nan=True)
    for result in results if value is not None else ():
        close(result, value, size, call)


def state_of(metric):
    return {
        name: [t.clone() for t in part] if isinstance(part, list) else part.clone()
        for name, part in metric.metric_state.items()
    }


def assert_same_state(found, before):
    torch.testing.assert_close(found, before, rtol=0, atol=0, equal_nan=True)


@QUICK
@given(inputs())
def test_values_are_those_of_the_slow_loops_or_an_error_says_why(call):
    value_or_error(call)


@pytest.mark.long
@LONG
@given(inputs())
def test_values_are_those_of_the_slow_loops_or_an_error_says_why_at_length(call):
    value_or_error(call)


# Calls in any order ------------------------------------------------------------------------------------------------

SKETCHES = [
    Case(f"{cls.__name__}-sketch", function, cls, "binary", {}, {"resolution": 2048})
    for function, cls in ((tc.ks, tc.KS), (tc.ace, tc.ACE))
]
READ_ALIKE = {  # what may be in one collection: the same numbers mean the same
    (task, from_logits): [
        case for case in CASES if (case.task, case.options.get("from_logits", False)) == (task, from_logits)
    ]
    for task in REDUCTIONS
    for from_logits in (False, True)
}


class Streamed:
    """A metric, or some in a collection, and the batches that must have been counted."""

    calls = (
        *("update", "forward", "refused", "compute", "reset", "merge", "merge_another", "copy", "save", "cast"),
        "update_in_inference_mode",
    )

    def __init__(self, cases, draw):
        self.cases, self.draw, self.seen = cases, draw, []
        self.metric = self.fresh()

    def fresh(self):
        if len(self.cases) == 1:
            return self.cases[0].metric()
        return tc.CalibrationCollection({case.name: case.metric() for case in self.cases})

    @property
    def members(self):
        return members_of(self.metric)

    def batch(self):
        """Predictions, targets, weights or None. Of half types where a sketch is exact for no others."""
        case, n = self.cases[0], self.draw(st.sampled_from([0, 1, 2, 9]))
        dtype = self.draw(st.sampled_from(FLOATS[:2] if case in SKETCHES else FLOATS))
        seed = self.draw(st.integers(0, 99))
        preds, target = case.data(n=n, seed=seed, dtype=dtype)
        whole = any(case.whole_weights for case in self.cases)
        weights = torch.arange(n) % 3 if whole else case.weights(n, seed)
        return preds, target, weights if seed % 3 == 0 else None

    def check(self, values, batches):
        """Held against the functions over all batches at once, in float64."""
        preds = torch.cat([preds.double() for preds, _, _ in batches])
        target = torch.cat([target for _, target, _ in batches])
        weights = torch.cat([torch.ones(len(p)).double() if w is None else w.double() for p, _, w in batches])
        tolerance = 1e-11 if all(p.dtype == torch.float64 for p, _, _ in batches) else 2e-5
        values = values if isinstance(values, dict) else {self.cases[0].name: values}
        assert set(values) == {case.name for case in self.cases}
        for case in self.cases:
            value = values[case.name]
            expected = case.call(preds, target, weights=weights, validate_args=False)
            assert value.dtype == torch.float64
            torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance, equal_nan=True)

    def update(self):
        preds, target, weights = batch = self.batch()
        self.metric.update(preds, target, weights=weights)
        self.seen.append(batch)

    def update_in_inference_mode(self):
        with torch.inference_mode():
            self.update()

    def forward(self):
        preds, target, weights = batch = self.batch()
        self.check(self.metric(preds, target, weights=weights), [batch])
        self.seen.append(batch)

    def refused(self):
        """A batch with one bad row leaves everything as it was."""
        preds, target = self.cases[0].data(n=5, seed=1)
        weights = torch.ones(5)
        bad = self.draw(st.sampled_from(["preds", "target", "weights", "shape", "dtype"]))
        if bad == "shape":
            target = target[:3]
        elif bad == "dtype":
            preds = preds.long()
        else:
            {"preds": preds, "target": target, "weights": weights}[bad][2] = math.nan if bad == "preds" else -1
        before = [(state_of(metric), metric.update_count) for metric in self.members]
        call = self.draw(st.sampled_from([self.metric.update, self.metric.forward]))
        assert isinstance(outcome(lambda: call(preds, target, weights=weights)), Exception)
        for metric, (state, count) in zip(self.members, before, strict=True):
            assert_same_state(state_of(metric), state)
            assert metric.update_count == count

    def compute(self):
        if self.seen:  # without any update torchmetrics warns
            for _ in range(2):
                self.check(self.metric.compute(), self.seen)

    def reset(self):
        self.metric.reset()
        self.seen = []

    def merge(self):
        """With another of its kind, given whole or as its state."""
        other, (preds, target, weights) = self.fresh(), self.batch()
        other.update(preds, target, weights=weights)
        whole = self.draw(st.booleans())
        for mine, theirs in zip(self.members, members_of(other), strict=True):
            mine.merge_state(theirs if whole else theirs.metric_state)
        self.seen.append((preds, target, weights))

    def merge_another(self):
        other = tc.ECE(task="binary", n_bins=13)
        other.update(torch.tensor([0.3]), torch.tensor([1]))
        for metric in self.members:
            before = state_of(metric)
            for given_state in (other, other.metric_state):
                assert isinstance(outcome(lambda m=metric, s=given_state: m.merge_state(s)), Exception)
                assert_same_state(state_of(metric), before)

    def copy(self):
        self.metric = pickle.loads(pickle.dumps(self.metric)) if self.draw(st.booleans()) else self.metric.clone()

    def save(self):
        """Load what was saved into a new one."""
        self.metric.persistent(True)
        saved, self.metric = self.metric.state_dict(), self.fresh()
        self.metric.persistent(True)
        self.metric.load_state_dict(saved)

    def cast(self):
        self.metric = self.metric.to(self.draw(st.sampled_from(FLOATS)))


def members_of(metric):
    return list(metric.values()) if isinstance(metric, tc.CalibrationCollection) else [metric]


def in_any_order(data):
    kind = data.draw(st.sampled_from(["one", "one", "one", "sketch", "collection"]))
    if kind == "collection":
        alike = READ_ALIKE[data.draw(st.sampled_from(list(READ_ALIKE)))]
        cases = data.draw(st.lists(st.sampled_from(alike), min_size=2, max_size=5, unique_by=str))
    else:
        cases = [data.draw(st.sampled_from(SKETCHES if kind == "sketch" else CASES))]
    streamed = Streamed(cases, data.draw)
    for name in data.draw(st.lists(st.sampled_from(Streamed.calls), min_size=2, max_size=10)):
        getattr(streamed, name)()
    streamed.update()
    streamed.compute()


@settings(QUICK, max_examples=100)
@given(st.data())
def test_calls_in_any_order_count_every_batch_once(data):
    in_any_order(data)


@pytest.mark.long
@LONG
@given(st.data())
def test_calls_in_any_order_count_every_batch_once_at_length(data):
    in_any_order(data)

"""Every option of every function and class refuses wrong values by an error that names it. Unknown options, too.

A new metric is tested without changes; a new option needs wrong values in `WRONG`.
"""

import inspect
import math
from functools import partial

import pytest
import torch
from cases import formulas, squared_gap
from helpers.refusals import Refusal, assert_refused, check_each

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.metrics.base import CalibrationMetric

P, Y = torch.tensor([0.2, 0.7, 0.4, 0.9]), torch.tensor([0, 1, 0, 1])
Q = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3]])
BINARY = {"preds": P, "target": Y, "task": "binary"}
MULTICLASS = {"preds": Q, "target": torch.tensor([1, 0, 2, 1]), "task": "multiclass"}
MULTILABEL = {"preds": Q, "target": (Q > 0.3).long(), "task": "multilabel"}

FUNCTIONS = {name: f for name in F.__all__ if inspect.isfunction(f := getattr(F, name))}
WITHOUT_TASK = {
    "boundary_band",
    "by_group",
    "expected_cost",
    "from_hidden",
    "mean_probabilities",
    "nees",
    "nees_interval",
}  # these are tested in tests/metrics
CLASSES = {
    name: cls for name in tc.__all__ if inspect.isclass(cls := getattr(tc, name)) and issubclass(cls, CalibrationMetric)
}
WRAPPERS = {"ByGroup", "Clustered", "Bootstrapped"}
MADE = {name: made for name, made in (FUNCTIONS | CLASSES).items() if name not in WITHOUT_TASK | WRAPPERS}

CROSSED = {"n_min": 3, "n_max": 2}
FALLING, REPEATED, LATE, SHORT = [0, 0.6, 0.4, 1], [0, 0.5, 0.5, 1], [0.1, 0.5, 1], [0, 0.5, 0.9]
# Wrong values by option, for every function and class that has the option. A dict has other options beside it.
WRONG = {
    "task": ["regression", 2],
    "average": ["micro", None],  # None is valid for several classes or labels
    "mode": ["max", "classwise", tc.TopK(2)],
    "positive_classes": [[1]],  # of a binary task
    "priors": [[0.2, 0.3, 0.5], [1.0, 1.0], [-0.5, 1.5]],
    "ignore_index": [0.5, 10**20, "0"],
    "nan_policy": ["skip"],
    "from_logits": ["yes", 1],
    "validate_args": ["no"],
    "class_axis": [1.5],
    "batch_dims": ["1", 5],
    "num_classes": [3, 1.5],
    "num_labels": [3],
    "batch_shape": [3, (0,), "2"],
    "persistent": [1],
    "per_image": ["yes", 1, 0],
    "resolution": [0, -5, 64.0, True, "fine", 10**9],
    "reduction": ["sum"],
    "normalize": ["max"],
    "n_bins": [0, 2.5, 2**20 + 1],
    "right": ["no"],
    "bins": ["quantile", [0.0], FALLING, REPEATED, LATE, SHORT, [0, math.nan, 1]],
    "debiased": ["no"],
    "restart": ["no"],
    "ties": ["first"],
    "n_min": [CROSSED, 0, 1.0],
    "n_max": [0],
    "variant": ["v2"],
    "norm": ["l3"],
    "alpha": [0.0, 1.0, math.nan, "5%", True],
    "test": ["z"],
    "distance": ["cosine", 2],
    "delta": [0.0, math.inf, math.nan, "small", True],
    "score": ["crps"],
    "loss": ["gap"],
    "cost": [[[0, 1]], tc.CostMatrix.zero_one(3)],
    "coverage": [0, -0.1, 1.1, math.nan, math.inf, "80%", True, None],
    "risk": [-0.1, 1.1, math.nan, "5%", False, None],
    "span": [0, None],
    "degree": [3],
    "n_points": [1],
    "points": [0, [0.5, 1.0], [[0.5]]],
    "weight": ["nll"],
    "p": [3],
    "eps": [1.0, "a", True],
    "bandwidth": [-1.0, "wide"],
    "kernel": ["rbf"],
    "estimator": ["u"],
    "block_size": [1],
    "chunk": [0],
    "component": ["none", None],
    "with_ecd": ["no"],
    "preds": [P + 1, Y],
    "target": [Y + 1, Y[:3]],
    "weights": [P - 1, P[:3], 1.0],
}
WRONG_OF_CLASSES = {
    "mode": ["max", "positive", tc.TopK(4), {"positive_classes": [1], "mode": "classwise"}],
    "positive_classes": [[], [0, 3], [-1], [1, 1], [0.5]],
}
WRONG_OF_LABELS = {"mode": ["positive", tc.TopK(2)], "average": ["micro"]}


def assert_named(call, wrong):
    """Check that each wrong value raises an error that names the option. A dict contains other options, too."""
    rows = [(name, value) for name, values in wrong.items() for value in values]

    def check(row):
        name, value = row
        given = value if isinstance(value, dict) else {name: value}
        assert_refused(Refusal(partial(call, **given), f"`{name}` must", (TypeError, ValueError)))

    check_each(rows, check)


def options_of(name):
    return inspect.signature(MADE[name]).parameters


def call_of(name, data=BINARY):
    """Return a valid call, to which wrong options can be added."""
    given = {key: value for key, value in data.items() if key in options_of(name)}
    given |= {"loss": squared_gap} if "loss" in options_of(name) else {}
    given |= {"cost": [[0, 1], [1, 0]]} if name == "bayes_decisions" else {}
    return partial(MADE[name], **given)


def wrong_options(name, table):
    return {option: values for option, values in table.items() if option in options_of(name)}


of_all = pytest.mark.parametrize("name", MADE)


@of_all
def test_wrong_values_of_every_option_raise_an_error_that_names_it(name):
    assert_named(call_of(name), wrong_options(name, WRONG))


def test_every_option_has_wrong_values():
    options = {option for name in MADE for option in options_of(name)}
    assert options - set(WRONG) == {"level", "n_replicates", "seed"}  # of tests/inference
    assert set(WRONG) <= options


@pytest.mark.parametrize("name", [name for name in MADE if name in FUNCTIONS and "mode" in options_of(name)])
def test_modes_and_classes_of_another_task_raise_an_error(name):
    assert_named(call_of(name, MULTICLASS), wrong_options(name, WRONG_OF_CLASSES))
    assert_named(call_of(name, MULTILABEL), wrong_options(name, WRONG_OF_LABELS))


@pytest.mark.parametrize("case", formulas())
def test_weights_must_be_whole_numbers_if_and_only_if_a_metric_counts_rows(case):
    preds, target = case.data(n=6)
    call, halves = partial(case.call, preds, target), torch.full((6,), 0.5)
    if case.whole_weights:
        assert_named(call, {"weights": [halves]})
        assert_named(partial(case.metric().update, preds, target), {"weights": [halves]})
    else:
        call(weights=halves)


@of_all
def test_unknown_options_raise_an_error_that_names_them(name):
    """Options of all other functions and classes, and names of internal arguments."""
    internal = {"binning", "input_format", "nonsense", "accumulator"}
    unknown = (internal | {option for made in MADE for option in options_of(made)}) - set(options_of(name))
    call, wrong = call_of(name), []
    for option in unknown:
        with pytest.raises((TypeError, ValueError)) as raised:
            call(**{option: None})
        wrong += [option] if option not in str(raised.value) else []
    assert not wrong


@of_all
def test_task_is_the_only_option_that_may_be_given_by_position(name):
    given = call_of(name).keywords
    task = given.pop("task")
    data = [given.pop(key) for key in ("preds", "target") if key in given]
    named, by_position = MADE[name](*data, task=task, **given), MADE[name](*data, task, **given)
    if name in CLASSES:
        assert repr(by_position) == repr(named)
    else:
        torch.testing.assert_close(values_of(by_position), values_of(named), equal_nan=True)
    for options in ((task, 5), (task,)):
        with pytest.raises(TypeError, match=r"options other than `task` must be given by name|positional arg|multiple"):
            MADE[name](*data, *options, **given, **({"task": task} if len(options) == 1 else {}))


def values_of(result):
    """Return the tensors of a result."""
    if torch.is_tensor(result):
        return [result]
    return [x for x in (result if isinstance(result, tuple) else vars(result).values()) if torch.is_tensor(x)]

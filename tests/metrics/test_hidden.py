"""Metrics of hidden states and a head equal those of the logits, which are not written."""

from functools import partial

import pytest
import torch
from cases import CASES, N_CLASSES
from helpers.hidden import BIAS, COMMON, HIDDEN, TARGET, TRANSFORMED, WEIGHT, logits
from processes import run_ranks

import torchcalib as tc
from torchcalib.functional import from_hidden

close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12, equal_nan=True)
NEED_ALL = (tc.TotalVariation, tc.KLDivergence, tc.EntropyGap, tc.SKCE, tc.EstimationError, tc.RankingScore)


def needs_all(case, metric):
    """Return whether the metric of a case needs all class probabilities."""
    mode, options = getattr(metric.accumulator, "mode", None), case.options
    if mode == "classwise" or isinstance(metric, NEED_ALL):
        return True
    return options.get("cost") is not None or options.get("component") == "noise_floor"


@pytest.mark.parametrize("part", range(4))
def test_every_metric_equals_that_of_logits_or_names_what_it_needs(part):
    """A metric that needs all class probabilities raises, and its state is unchanged."""
    weight, bias, target = WEIGHT[:N_CLASSES], BIAS[:N_CLASSES], TARGET.clamp(min=0) % N_CLASSES
    z = logits(weight=weight, bias=bias)
    cases = [case for case in CASES if case.task == "multiclass" and "positive_classes" not in case.options]
    for case in cases[part::4]:
        options = {**case.options, **case.own, "task": "multiclass", "from_logits": True}
        metric, expected = case.cls(**options), case.cls(**options)
        if needs_all(case, metric):
            with pytest.raises(TypeError, match="needs all class probabilities"):
                metric.update_from_hidden(HIDDEN, weight, target, bias=bias)
            assert metric._update_count == 0
            continue
        expected.update(z, target)
        metric.update_from_hidden(HIDDEN, weight, target, bias=bias)
        close(metric.compute(), expected.compute(), msg=lambda text, case=case: f"{case}: {text}")


def make_collection():
    return tc.CalibrationCollection(
        {
            **{metric.__name__: metric(**COMMON) for metric in (tc.NLL, tc.BrierScore, tc.ECD, tc.ECE, tc.ACE)},
            "groups": tc.ByGroup(tc.ECE(**COMMON), num_groups=2),
            "full groups": tc.ByGroup(tc.FullECE(**COMMON), num_groups=2),
            "clusters": tc.Clustered(tc.NLL(**COMMON)),
            "interval": tc.Bootstrapped(tc.Accuracy(**COMMON), n_replicates=39),
        }
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_collection_with_weights_groups_and_clusters_equals_that_of_logits(dtype):
    """All transformations of the head count, and ignored rows may be NaN."""
    hidden, weight, bias = (x.to(dtype) for x in (HIDDEN, WEIGHT, BIAS))
    columns = {"weights": (TARGET % 3).clamp(min=0), "groups": TARGET % 2, "clusters": torch.arange(3)}
    columns["groups"] = columns["groups"].masked_fill(TARGET == -100, -1)
    expected, found = make_collection(), make_collection()
    expected.update(logits(hidden.double(), weight.double(), bias.double(), **TRANSFORMED), TARGET, **columns)
    hidden[0, :4] = torch.nan
    found.update_from_hidden(hidden, weight, TARGET, bias=bias, **TRANSFORMED, **columns)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found["NLL"].compute(), expected["NLL"].compute(), rtol=tolerance, atol=0)
    for name, value in expected.compute().items():
        if dtype == torch.float32 and name != "ACE":  # the bins of nearly equal confidences may differ
            torch.testing.assert_close(found[name].compute(), value, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("metric", [tc.nll, tc.brier_score, tc.ecd, tc.ece, partial(tc.ks, from_logits=True)])
def test_a_function_has_the_value_and_gradient_for_logits(metric):
    parameters = [x.clone().requires_grad_() for x in (HIDDEN, WEIGHT, BIAS)]
    hidden, weight, bias = parameters
    value = from_hidden(metric, hidden, weight, TARGET, bias=bias, ignore_index=-100, **TRANSFORMED)
    expected = metric(logits(*parameters, **TRANSFORMED), TARGET, **COMMON)
    close(value, expected)
    for found, wanted in zip(*(torch.autograd.grad(each, parameters) for each in (value, expected)), strict=True):
        close(found, wanted, rtol=1e-7)


def test_missing_rows_are_dropped_on_request():
    hidden = HIDDEN.clone()
    hidden[1, 2, 3] = torch.nan
    metric = tc.NLL(**COMMON, nan_policy="drop")
    metric.update_from_hidden(hidden, WEIGHT, TARGET)
    assert metric.n_dropped() == 1
    close(metric.compute(), tc.nll(logits(hidden, bias=0), TARGET, nan_policy="drop", **COMMON).double())


H, W, T = HIDDEN.float(), WEIGHT.float(), TARGET
WRONG = {
    "number of features": (
        lambda m: m.update_from_hidden(H, W[:, 1:], T),
        ValueError,
        "`weight` must have shape",
    ),
    "transposed": (lambda m: m.update_from_hidden(H, W.T, T), ValueError, "transpose it"),
    "dtype": (lambda m: m.update_from_hidden(H, W.bfloat16(), T), TypeError, "`weight` must have the dtype"),
    "integers": (lambda m: m.update_from_hidden(H.long(), W, T), TypeError, "`hidden` must be floating"),
    "one row": (lambda m: m.update_from_hidden(H[0, 0], W, T[0, 0]), ValueError, r"\(\.\.\., N, H\)"),
    "partitioned": (lambda m: m.update_from_hidden(H, W[:0], T), ValueError, "GatheredParameters"),
    "list": (lambda m: m.update_from_hidden(H.tolist(), W, T), TypeError, "`hidden` must be a torch.Tensor"),
    "bias": (lambda m: m.update_from_hidden(H, W, T, bias=W[:, 0][:3]), ValueError, "`bias` must have shape"),
    "labels": (lambda m: m.update_from_hidden(H, W, T + 40), ValueError, "`target` must be a class index"),
    "soft": (lambda m: m.update_from_hidden(H, W, logits(H, W, 0)), TypeError, "`target` must be integer labels"),
    "shape": (lambda m: m.update_from_hidden(H, W, T[:2]), ValueError, "`target` must have shape"),
    "NaN": (lambda m: m.update_from_hidden(H / 0 * 0, W, T), ValueError, "`hidden` must give logits without NaN"),
    "softcap": (lambda m: m.update_from_hidden(H, W, T, softcap=0.0), ValueError, "`softcap` must be positive"),
    "temperature": (lambda m: m.update_from_hidden(H, W, T, temperature="1"), TypeError, "`temperature` must be a"),
    "meta": (lambda m: m.update_from_hidden(H, W.to("meta"), T), ValueError, "must be on the device of `hidden`"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("make", [lambda: tc.NLL(**COMMON), make_collection], ids=["metric", "collection"])
def test_wrong_input_raises_and_changes_nothing(make, name):
    call, error, message = WRONG[name]
    metric = make()
    metrics = [metric] if isinstance(metric, tc.NLL) else list(metric.values())
    before = [each.metric_state for each in metrics]
    columns = {} if isinstance(metric, tc.NLL) else {"groups": TARGET.clamp(min=0) % 2, "clusters": torch.arange(3)}
    metric.update_from_hidden = partial(metric.update_from_hidden, **columns)
    with pytest.raises(error, match=message):
        call(metric)
    for each, state in zip(metrics, before, strict=True):
        assert each._update_count == 0
        for part, value in each.metric_state.items():
            close(value, state[part])


@pytest.mark.parametrize(
    ("options", "name"), [({"from_logits": False}, "from_logits"), ({"positive_classes": [1]}, "positive_classes")]
)
def test_options_must_be_those_of_logits(options, name):
    metric = tc.NLL(**{**COMMON, **options})
    with pytest.raises(ValueError, match=f"`{name}` must be .* for hidden states"):
        metric.update_from_hidden(HIDDEN, WEIGHT, TARGET)


@pytest.mark.parametrize("weights", ["plain", pytest.param("sharded", marks=pytest.mark.extended)])
def test_ranks_with_parts_of_the_vocabulary_have_the_values_of_the_whole(weights, tmp_path):
    codes, output = run_ranks(2, tmp_path, "hidden_ranks", weights)
    assert codes == [0, 0], output

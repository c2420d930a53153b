"""Unusual tensors and default devices give the value of a plain tensor, or an error that names the rule."""

from functools import partial

import pytest
import torch
from cases import CALLS, CASES, covering, path_of
from helpers import fits
from helpers.refusals import check_each
from helpers.reports import QUICK
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

import torchcalib as tc
import torchcalib.functional as F
from torchcalib import losses

FAKE = FakeTensorMode(allow_non_fake_inputs=True)


class Named(torch.Tensor):
    """A subclass without memory of its own, as packages define for images or audio."""


def negated(x):
    """Return a view with the values of x, whose memory contains -x, as `x.conj().imag` does."""
    return torch._neg_view(-x)


ACCEPTED = {
    "negated view": negated,
    "imaginary part": lambda x: torch.complex(x.double(), -x.double()).conj().imag.to(x.dtype),
    "subclass": lambda x: x.as_subclass(Named),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=x.is_floating_point()),
    "strided view": lambda x: torch.stack((x, x), -1)[..., 0],
}
REFUSED = {
    "conjugate": lambda x: x.to(torch.complex128).conj(),
    "meta": lambda x: x.to("meta"),
    "fake": FAKE.from_tensor,
    "nested": lambda x: torch.nested.nested_tensor(list(x.reshape(len(x), -1))),
    "jagged": lambda x: torch.nested.nested_tensor(list(x.reshape(len(x), -1)), layout=torch.jagged),
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.reshape(len(x), -1).to_sparse_csr(),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 0.01, 0, torch.quint8),
    "masked": lambda x: masked_tensor(x, torch.ones_like(x, dtype=torch.bool)),
}
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in ("The PyTorch API of", "Sparse CSR", "torch.quantize_per_tensor", "The PyTorch")
]


LISTS = {
    "negated views": lambda x: list(negated(x)),
    "leaves": lambda x: list(ACCEPTED["parameter"](x)),
    "nested": lambda x: [list(row) if row.dim() else row for row in ACCEPTED["parameter"](x)],
}
"""Lists of tensors that NumPy does not convert."""


def check_kinds(call, refused=REFUSED, accepted=ACCEPTED, **columns):
    """Check a call with every kind of each column, and of all columns."""
    expected = call(**columns)

    def check(row):
        kind, which = row
        convert = (accepted | refused)[kind]
        given = {name: convert(x) if which in (name, "all") else x for name, x in columns.items()}
        if kind in refused:
            with pytest.raises((TypeError, ValueError)) as raised:
                call(**given)
            message = str(raised.value)
            assert f"`{next(iter(columns)) if which == 'all' else which}` must" in message, message
            assert "got" in message, message
        else:
            found = call(**given)
            assert type(found) is torch.Tensor
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)

    check_each([(kind, which) for kind in accepted | refused for which in (*columns, "all")], check)


def updated(metric, *columns, **more):
    metric.update(*columns, **more)
    return metric


@pytest.mark.parametrize("case", list(covering(CASES, lambda case: {(type(case.example.kind), case.task)}, path_of)))
def test_metrics_give_the_value_of_a_plain_tensor_or_a_clear_error(case):
    preds, target = case.data(n=20)
    columns = {"preds": preds, "target": target, "weights": case.weights(20)}
    check_kinds(case.call, **columns)
    check_kinds(lambda **given: updated(case.metric(), **given).compute(), **columns)


X, LABELS = fits.data(40)
B, Y = fits.single(40)
GROUPS, W = torch.arange(40) % 3, torch.ones(40, dtype=torch.float64)
COLUMNS = {"preds": X, "target": LABELS, "weights": W, "clusters": GROUPS}


def of_report(preds=X, target=LABELS, **columns):
    return torch.tensor(tc.report(preds, target, from_logits=True, **columns, **QUICK)["nll"])


def of_comparison(preds, target, weights):
    compared = tc.compare({"a": preds, "b": preds}, target, weights=weights, from_logits=True, n_replicates=39)
    return torch.tensor(compared.lines[0].values["b"])


def of_wrapper(make, **columns):
    return updated(make(), B, Y, **columns).compute()


def of_penalty(penalty, preds, target):
    is_class = isinstance(penalty, type)
    return penalty(**fits.multi)(preds, target) if is_class else penalty(preds, target, **fits.multi)


def test_other_calls_give_the_value_of_a_plain_tensor_or_a_clear_error():
    binary = fits.binary
    members = [tc.NLL(**binary), tc.ECE(**binary), tc.KS(**binary)]
    collection = tc.CalibrationCollection(members)

    def together(**given):
        collection.reset()
        return torch.stack(list(updated(collection, **given).compute().values()))

    check_kinds(together, preds=B, target=Y, weights=W)
    for metric in members:
        check_kinds(partial(of_wrapper, partial(tc.ByGroup, metric, num_groups=3)), groups=GROUPS)
        check_kinds(partial(of_wrapper, partial(tc.Clustered, metric)), clusters=GROUPS)
    check_kinds(lambda groups: F.by_group(F.ece, B, Y, groups, **binary), groups=GROUPS)
    costs = tc.CostMatrix(1 - torch.eye(4, dtype=torch.float64))
    check_kinds(lambda **given: F.expected_cost(**given, cost=costs), decisions=LABELS, target=LABELS.flip(0))
    with_memory = {kind: convert for kind, convert in REFUSED.items() if kind != "meta"}  # losses read no values
    for name in losses.__all__:
        if name != "PenaltyLoss":
            check_kinds(partial(of_penalty, getattr(losses, name)), with_memory, preds=X, target=LABELS)


@pytest.mark.parametrize("columns", [{"groups": GROUPS}, pytest.param(COLUMNS, marks=pytest.mark.extended)])
def test_reports_give_the_value_of_a_plain_tensor_or_a_clear_error(columns):
    check_kinds(of_report, **columns)


@pytest.mark.extended
def test_comparisons_give_the_value_of_a_plain_tensor_or_a_clear_error():
    check_kinds(of_comparison, preds=X, target=LABELS, weights=W)


def test_lists_of_tensors_give_the_value_of_a_plain_tensor_or_a_clear_error():
    check_lists = partial(check_kinds, refused={}, accepted=LISTS)
    check_lists(partial(F.ece, **fits.multi), preds=X, target=LABELS, weights=W)
    check_lists(lambda **given: updated(tc.ECE(**fits.multi), **given).compute(), preds=X, target=LABELS, weights=W)
    check_lists(partial(of_wrapper, partial(tc.Clustered, tc.ECE(**fits.binary))), clusters=GROUPS)
    check_lists(of_report, groups=GROUPS, clusters=GROUPS)
    check_lists(partial(of_comparison, target=LABELS, weights=W), preds=X)
    check_lists(lambda preds, target: fits.fresh(fits.T).fit(preds, target)(preds), preds=X, target=LABELS)
    exact = F.ece(list(X.bfloat16()), LABELS, **fits.multi)
    assert exact == F.ece(X.bfloat16(), LABELS, **fits.multi)
    for mixed in ([0.25, torch.tensor(0.75)], [torch.tensor(0.25), 0.75]):
        assert F.ece(mixed, [0, 1], task="binary") == 0.25
    preds = X.clone().requires_grad_()
    F.nll(list(preds), LABELS, **fits.multi).backward()
    assert preds.grad.any()


@pytest.mark.parametrize("calibrator", fits.ALL, ids=fits.name)
def test_calibrators_give_the_value_of_a_plain_tensor_or_a_clear_error(calibrator):
    check_kinds(lambda preds, target: fits.fresh(calibrator).fit(preds, target, **fits.binary)(B), preds=B, target=Y)
    fitted = fits.fresh(calibrator).fit(B, Y, **fits.binary)
    check_kinds(lambda preds: fitted(preds), preds=B)
    check_kinds(lambda preds: fitted.predict_proba(preds), preds=B)


# Any default device of torch


def same_on_meta(call):
    expected = call()
    with torch.device("meta"):
        found = call()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", list(covering(CALLS, lambda case: {case.function}, path_of)))
def test_functions_under_another_default_device(case):
    preds, target = case.data()
    weights = case.weights(40)
    same_on_meta(lambda: case.call(preds, target))
    same_on_meta(lambda: case.call(preds, target, weights=weights))


def test_tables_tests_and_curves_under_another_default_device():
    preds, target = (
        torch.rand(60, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        torch.arange(60) % 2,
    )
    how = {"task": "binary"}
    same_on_meta(lambda: F.tce_table(preds, target, **how).to_dict()["gap"])
    same_on_meta(lambda: F.calibration_curve(preds, target, **how).to_dict()["gap"])
    same_on_meta(lambda: list(F.risk_coverage_curve(preds, target, **how)))
    for mode in ("positive", "top_label"):
        same_on_meta(lambda mode=mode: tc.calibration_test(preds, target, mode=mode, n_replicates=39, **how).p_value)


def test_reports_comparisons_and_calibrators_under_another_default_device():
    logits, target = fits.data(60)
    flat = tc.report(logits, target, from_logits=True, **QUICK).flat
    with torch.device("meta"):
        assert tc.report(logits, target, from_logits=True, **QUICK).flat() == flat()

"""Targets that are all 0 or 1 are labels, whatever their dtype and in whatever pieces: the evidence is the same."""

import math
from dataclasses import replace

import oracles
import pytest
import torch
from cases import CASES, N_CLASSES, covering, path_of
from scipy import stats

import torchcalib as tc
from torchcalib.report import ReportBuilder
from torchcalib.report.saving import builder_of_bytes, state_bytes

F64 = torch.float64
FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FIELDS = ("value", "noise_floor", "p_value", "low", "high")
FEW = {"n_replicates": 39}
TESTED = [
    case
    for case in CASES
    if issubclass(case.cls, tc.consistency.TestedMetric)
    and not case.format.hard_targets
    and case.options.get("component", "ici") == "ici"
    and case.cls is not tc.SmECE  # of many cells, whose sums are looked at below
]
by_case = pytest.mark.parametrize(
    "case", list(covering(TESTED, lambda case: {case.cls, path_of(case)}, lambda case: (case.cls, path_of(case))))
)


def same(found, expected):
    for name in FIELDS:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-12, equal_nan=True)


def floating(case, target, dtype=F64):
    """The same labels as soft targets."""
    return torch.nn.functional.one_hot(target, N_CLASSES).to(dtype) if case.task == "multiclass" else target.to(dtype)


def updated(metric, *pieces, **options):
    for preds, target in pieces:
        metric.update(preds, target, **options)
    return metric


def noise_of(metric):
    """Sums over bins: `spread` and `noise`."""
    b = metric.statistic()
    return torch.stack((b.spread, b.noise))


@by_case
def test_law_evidence_of_labels_does_not_depend_on_their_dtype_and_pieces(case):
    preds, target = case.data(n=60)
    expected = tc.evidence(case.metric(), preds, target, **FEW)
    same(tc.evidence(case.metric(), preds, floating(case, target), **FEW), expected)
    metric = case.metric()
    for rows, dtype in zip(torch.arange(60).split(13), (*FLOATING, None), strict=True):
        metric.update(preds[rows], target[rows] if dtype is None else floating(case, target[rows], dtype))
    same(metric.evidence(**FEW), expected)
    if case.task != "multiclass":
        same(tc.evidence(case.metric(), preds, target.bool(), **FEW), expected)


@by_case
def test_law_the_same_with_copies_and_with_rows_that_are_left_out(case):
    """Rows that are shares of votes, but count nowhere: of weight 0, or missing."""
    preds, target = case.data(n=50)
    copies = torch.randint(0, 3, (50,), generator=torch.Generator().manual_seed(0))
    expected = tc.evidence(case.metric(), preds, target, weights=copies, **FEW)
    shares = floating(case, target)
    shares[copies == 0] = torch.full_like(shares[copies == 0], 1 / N_CLASSES)
    same(tc.evidence(case.metric(), preds, shares, weights=copies, **FEW), expected)
    preds[0], shares[0] = math.nan, 1 / N_CLASSES
    drops = replace(case, own={**case.own, "nan_policy": "drop"})
    expected = tc.evidence(drops.metric(), preds, target, weights=copies, **FEW)
    same(tc.evidence(drops.metric(), preds, shares, weights=copies, **FEW), expected)


@by_case
def test_law_one_share_makes_shares_of_all_of_them_wherever_it_is(case):
    preds, target = case.data(n=60)
    shares = floating(case, target)
    shares[40] = torch.softmax(torch.arange(N_CLASSES), -1, F64) if case.task == "multiclass" else 0.3
    whole = tc.evidence(case.metric(), preds, shares, **FEW)
    for sizes in ([60], [10, 50], [41, 19], [40, 1, 19]):
        pieces = zip(preds.split(sizes), shares.split(sizes), strict=True)
        same(updated(case.metric(), *pieces).evidence(**FEW), whole)
    labels = tc.evidence(case.metric(), preds, floating(case, target), **FEW)
    nothing_by_construction = case.name == "esce-multiclass-classwise"  # the mean over classes that exclude each other
    assert torch.equal(whole.noise_floor, labels.noise_floor) == nothing_by_construction


@pytest.mark.parametrize("weighing", ["plain", "copies", "weights"])
def test_slow_loop_noise_of_a_state_that_has_seen_a_share_or_floating_weights(weighing):
    """As oracles.noise_of_bins has it: p (1 - p) of labels, and of floating targets of which one is a share (t - p)^2.

    Floating weights make shares of floating targets, and leave integers labels, which are so among shares too.
    """
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand(60, generator=generator, dtype=F64)
    target = (torch.rand(60, generator=generator, dtype=F64) < preds).double()
    weights = torch.randint(1, 4, (60,), generator=generator) if weighing != "plain" else torch.ones(60).long()
    given = {"plain": None, "copies": weights, "weights": weights / 2.0}[weighing]
    counted = (weights if given is None else given).tolist()
    for share in (target[30].item(), 0.25):
        target[30] = share
        metric, expected = tc.ECE(task="binary", n_bins=5), torch.zeros(2, 5, dtype=F64)
        for dtype, soft in ((F64, share == 0.25 or weighing == "weights"), (torch.int64, False)):
            labels = target.to(dtype)
            for rows in torch.arange(60).split(17):
                metric.update(preds[rows], labels[rows], weights=None if given is None else given[rows])
            pairs = list(zip(preds.tolist(), labels.tolist(), strict=True))
            noise = oracles.noise_of_bins(pairs, counted, 5, copies=weighing != "weights", soft=soft)
            expected += torch.tensor(noise, dtype=F64)
        metric.update(preds, target, weights=torch.zeros(60))  # which count nowhere
        torch.testing.assert_close(noise_of(metric), expected, rtol=1e-12, atol=1e-14)


# What is kept apart is told apart ------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "copies"])
@pytest.mark.parametrize("cls", [tc.ECE, tc.SmECE])
def test_series_labels_and_groups_with_a_share_are_shares_and_others_are_not(cls, weighted):
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand(3, 50, generator=generator, dtype=F64)
    target = (torch.rand(3, 50, generator=generator, dtype=F64) < preds).double()
    weights = torch.randint(1, 3, (50,), generator=generator) if weighted else None
    target[1, 7] = 0.4
    alone = [updated(cls(task="binary"), (preds[k], target[k]), weights=weights) for k in range(3)]
    expected = torch.stack([noise_of(metric) for metric in alone], 1)
    assert [torch.equal(*pair) for pair in expected.unbind(1)] == [True, False, True]
    all_weights = None if weights is None else weights.expand(3, 50)
    series = updated(cls(task="binary", batch_shape=(3,)), (preds, target), weights=all_weights)
    labels = updated(cls(task="multilabel", num_labels=3, average=None), (preds.T, target.T), weights=weights)
    groups = tc.ByGroup(cls(task="binary"), num_groups=3)
    numbers = torch.arange(3).unsqueeze(-1).expand(3, 50).flatten()
    for rows in torch.randperm(150, generator=generator).split(40):
        some = None if all_weights is None else all_weights.flatten()[rows]
        groups.update(preds.flatten()[rows], target.flatten()[rows], groups=numbers[rows], weights=some)
    for metric in (series, labels, groups):
        torch.testing.assert_close(noise_of(metric), expected, rtol=1e-12, atol=1e-14)


def test_groups_of_a_report_are_told_apart_wherever_it_was_cut():
    generator = torch.Generator().manual_seed(1)
    preds = torch.rand(90, generator=generator, dtype=F64)
    target = (torch.rand(90, generator=generator, dtype=F64) < preds).double()
    groups, given = torch.arange(90) % 3, {"task": "binary", "with_calibration": False, "with_intervals": False}

    def chance(table):
        return dict(zip(table.group, zip(table.noise_floor, table.p_value, strict=True), strict=True))

    of_labels = chance(tc.report(preds, target.long(), groups=groups, **given).groups)
    for share in (target[40].item(), 0.4):  # of group 1
        target[40] = share
        parts = [ReportBuilder(**given) for _ in range(2)]
        for part, rows in zip(parts, torch.arange(90).split([35, 55]), strict=True):
            part.update(preds[rows], target[rows], groups=groups[rows])
        merged = builder_of_bytes(state_bytes(parts[0]))
        merged.merge(parts[1])
        found = chance(merged.report().groups)
        whole = chance(tc.report(preds, target, groups=groups, **given).groups)
        for group in "012":
            assert found[group] == pytest.approx(whole[group], rel=1e-9)
            assert (found[group] == pytest.approx(of_labels[group], rel=1e-9)) == (share != 0.4 or group != "1")


# States --------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["ece", "classwise", "smece", "ks"])
def make(request):
    """Makes a metric, and data of it: labels as floating targets, and shares."""
    options = {"persistent": True}
    if request.param == "classwise":
        return lambda: tc.ECE(task="multiclass", num_classes=N_CLASSES, reduction="classwise", **options)
    cls = {"ece": tc.ECE, "smece": tc.SmECE, "ks": tc.KS}[request.param]
    return lambda: cls(task="binary", **options)


def data_of(metric):
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand(80, N_CLASSES, generator=generator, dtype=F64).softmax(-1)
    labels = torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    labels, shares = torch.nn.functional.one_hot(labels, N_CLASSES).double(), preds.roll(1, 0)
    if metric.input_format.task != "multiclass":
        preds, labels, shares = preds[:, 0], labels[:, 0], shares[:, 0]
    return preds.split(40), labels.split(40), shares.split(40)


def same_chance(found, expected):
    """The same sums of noise, or of a metric that keeps samples the same evidence."""
    if isinstance(found, tc.KS):
        same(found.evidence(**FEW), expected.evidence(**FEW))
    else:
        torch.testing.assert_close(noise_of(found), noise_of(expected), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("has_shares", [False, True], ids=["labels", "shares"])
def test_a_state_that_is_merged_saved_and_synced_knows_what_it_has_seen(make, has_shares):
    preds, labels, shares = data_of(make())
    pieces = (preds[0], labels[0]), (preds[1], shares[1] if has_shares else labels[1])
    given = [target.argmax(-1) if target.dim() > 1 else target.long() for target in labels]
    expected, of_labels = updated(make(), *pieces), updated(make(), *zip(preds, given, strict=True))
    if has_shares:
        with pytest.raises(AssertionError, match="not close"):
            same_chance(expected, of_labels)
    else:
        same_chance(expected, of_labels)
    one, other = (updated(make(), piece) for piece in pieces)
    merged, loaded, synced = make(), make(), make()
    merged.merge_state(one)
    merged.merge_state(other.state_dict())
    loaded.load_state_dict(merged.state_dict())
    announced = sum(metric.kind.announce(metric.state, rank, 2) for rank, metric in enumerate((one, other)))
    payloads = [metric.kind.payload(metric.state) for metric in (one, other)]
    synced.state = synced.kind.meet(announced, payloads)
    anew = expected.clone()
    anew.reset()
    for metric in (merged, loaded, synced, updated(anew, *pieces)):
        same_chance(metric, expected)


def test_shares_compile_and_map():
    preds, target = torch.tensor([[0.2, 0.7], [0.4, 0.9]], dtype=F64), torch.tensor([[0.0, 1.0], [0.5, 1.0]], dtype=F64)
    metric = tc.ECE(task="binary", n_bins=1, validate_args=False)

    def noise(q, t):
        return metric.recipe.of(metric.input_format.read(q, t)).noise

    expected = torch.stack([noise(q, t) for q, t in zip(preds, target, strict=True)])
    for found in (noise, torch.vmap(noise), torch.compile(noise, fullgraph=True, backend="eager")):
        torch.testing.assert_close(found(preds, target), expected)


# What it is for ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "copies"])
@pytest.mark.parametrize("beta", [(1.0, 1.0), (1.0, 12.0)], ids=["uniform", "skewed"])
def test_p_values_of_floating_labels_are_uniform(beta, weighted):
    """1,000 data sets of 200 labels of a calibrated model. Taken for shares they are not: p = 2e-7 where even."""
    generator = torch.Generator().manual_seed(0)
    shape = (1000, 200)
    a, b = (torch._standard_gamma(torch.full(shape, x, dtype=F64), generator=generator) for x in beta)
    preds = a / (a + b)
    target = (torch.rand(shape, generator=generator, dtype=F64) < preds).float()
    metric = tc.ECE(task="binary", batch_shape=(1000,))
    for rows in torch.arange(200).split(70):
        weights = torch.ones(1000, len(rows), dtype=torch.int64) if weighted else None
        metric.update(preds[:, rows], target[:, rows], weights=weights)
    found = metric.evidence(n_replicates=199, with_interval=False).p_value
    assert stats.kstest(found.numpy(), "uniform").pvalue > 0.01

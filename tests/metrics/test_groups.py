"""Metrics and functions by group: every value equals that of the rows of the group alone, for any batches."""

import itertools
from copy import deepcopy
from functools import partial
from statistics import NormalDist

import numpy as np
import pytest
import torch
from cases import CASES, covering, path_of
from helpers.compare import close
from helpers.samples import updated

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.calibration import relative_calibration_loss
from torchcalib.core import pieces
from torchcalib.core.inputs import InputFormat
from torchcalib.core.state import SumState
from torchcalib.inference import calibration_test
from torchcalib.inference.adjustment import benjamini_hochberg, shrunk_to_mean
from torchcalib.metrics import by_group

NAMES = ("nce-multiclass-logits", "ece-multiclass-classwise", "ece-per-label", "tce-multilabel-classwise", "ace-binary")
some_cases = pytest.mark.parametrize("case", [case for case in CASES if str(case).startswith(NAMES)], ids=str)
IN_PIECES = [case for case in CASES if not case.in_blocks]  # metrics over blocks are tested below
P, Y, FIRST = torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1])
N_GROUPS = 6


def random_groups(n, num_groups=N_GROUPS):
    """Return random group numbers. One group is empty, and the first has most samples."""
    groups = (torch.rand(n, generator=torch.Generator().manual_seed(1)) ** 2 * num_groups).long()
    return groups.masked_fill(groups == num_groups - 2, 0)


def loop(case, preds, target, groups, weights=None):
    """Return the values of the function for the rows of each of 6 groups."""
    weights = torch.ones(groups.shape) if weights is None else weights
    members = [groups == k for k in range(N_GROUPS)]
    return torch.stack([case.call(preds[rows], target[rows], weights=weights[rows]) for rows in members])


def by_group_of(case, **kwargs):
    return tc.ByGroup(case.metric(**kwargs), num_groups=N_GROUPS)


@pytest.mark.parametrize("case", list(covering(IN_PIECES, lambda case: {path_of(case)}, lambda case: case.cls)))
def test_values_by_group_equal_a_loop(case):
    """With weights, missing rows, rows without a group, and wrong group numbers of rows that do not count."""
    preds, target = case.data(n=90)
    groups, weights = random_groups(90), case.weights(90)
    kept = ~torch.isin(torch.arange(90), torch.tensor([3, 7, 11, 12]))
    weights[~kept] = 1
    expected = loop(case, preds[kept], target[kept], groups[kept], weights[kept]).double()
    groups[3] = -1
    given = {"task": case.task, "num_groups": N_GROUPS, "weights": weights.where(kept | (torch.arange(90) == 3), 0)}
    close(F.by_group(case.function, preds, target, groups, **given, **case.options).double(), expected)
    groups[7], preds[7], weights[7] = 99, torch.nan, 0
    groups[11], target[11] = -5, -100
    groups[12], preds[12] = 99, torch.nan
    metric = by_group_of(case, ignore_index=-100, nan_policy="drop")
    metric.update(preds, target, groups=groups, weights=weights)
    close(metric.compute(), expected)
    assert metric.compute()[4].isnan().all()
    assert metric.n_dropped() == (4 if case.task == "multilabel" else 1)
    close(metric.n(), groups[kept].bincount(weights[kept], minlength=6))


@pytest.mark.parametrize("case", list(covering(IN_PIECES, lambda case: {path_of(case)}, lambda case: case.cls)))
def test_forward_returns_the_batch_value_by_group_with_its_gradient(case):
    preds, target = case.data(n=40)
    groups = random_groups(40)
    metric = by_group_of(case)
    metric.update(preds, target, groups=groups)
    a, b, c = (preds.clone().requires_grad_() for _ in range(3))
    value, expected = metric(a, target, groups=groups), loop(case, b, target, groups).double()
    of_function = F.by_group(case.function, c, target, groups, task=case.task, num_groups=N_GROUPS, **case.options)
    close(value, expected)
    close(of_function.double(), expected)
    twice = [torch.cat((x, x)) for x in (preds, target, groups)]
    close(metric.compute(), loop(case, *twice).double())
    if case.differentiable:
        held = [k for k in range(N_GROUPS) if k != 4]
        for values in (value, expected, of_function):
            values[held].sum().backward()
        close(a.grad, b.grad)
        close(c.grad, b.grad)


def test_group_numbers_of_samples_take_4_bytes():
    metric, alone = tc.ByGroup(tc.KS(task="binary"), num_groups=2), tc.KS(task="binary")
    groups = FIRST.bool()
    metric.update(P, Y, groups=groups)
    alone.update(P, Y)
    groups.fill_(0)
    assert metric.n().tolist() == [1, 2]
    with_groups, without = (sum(c.nbytes for part in m.state[:-1] for c in part) for m in (metric, alone))
    assert with_groups == without + 4 * len(P)


OF_SUMS = [case for case in IN_PIECES if isinstance(case.example.kind, SumState)]
OF_SUMS = [case for case in OF_SUMS if case.cls is not tc.SmECE or case.task == "binary"]  # its values are slow


@pytest.mark.parametrize("case", list(covering(OF_SUMS, lambda case: {path_of(case)}, path_of)))
def test_values_of_groups_with_adjacent_rows_equal_a_loop(case, monkeypatch):
    """A piece whose rows are in the same group is added without groups. Two groups have no rows."""
    for name, size in (("_LARGE", 0), ("_CONVERTED", 10), ("_ROWS", 10)):
        monkeypatch.setattr(pieces, name, size)
    preds, target = case.data(n=60)
    groups = torch.arange(60) // 20 + 1
    groups[50:] = 0
    for weights, dtype in ((None, torch.uint8), (case.weights(60), torch.int32)):
        metric = by_group_of(case)
        metric.update(preds, target, groups=groups.to(dtype), weights=weights)
        close(metric.compute(), loop(case, preds, target, groups, weights).double(), rtol=1e-6, atol=1e-7)


@some_cases
def test_batch_elements_have_separate_groups(case):
    preds, target = case.data(n=60, lead=(2, 3))
    groups = random_groups(360).reshape(2, 3, 60)
    metric = by_group_of(case, batch_shape=(2, 3))
    metric.update(preds, target, groups=groups)
    values, n = metric.compute(), metric.n()
    assert values.shape[:3] == (6, 2, 3)
    for i, j in itertools.product(range(2), range(3)):
        close(values[:, i, j], loop(case, preds[i, j], target[i, j], groups[i, j]).double())
        assert n[:, i, j].tolist() == groups[i, j].bincount(minlength=6).tolist()


def test_wrong_group_numbers_on_a_device_are_counted_and_raise_in_compute(monkeypatch):
    """On CUDA no update reads values: bad rows are excluded, and `compute` raises an error."""
    metric = tc.ByGroup(tc.ECE(task="binary"), num_groups=3)
    read, in_groups = InputFormat.read, by_group.in_groups
    dropping = {"drop_invalid": True}
    monkeypatch.setattr(InputFormat, "read", lambda *args, **how: read(*args, **how | dropping))
    monkeypatch.setattr(by_group, "in_groups", lambda *args, **how: in_groups(*args, **how | dropping))
    p, y = torch.tensor([0.2, torch.nan, 0.9, 0.5]), torch.tensor([0, 1, 1, 0])
    metric.update(p, y, groups=torch.tensor([0, 7, 7, -1]))
    assert metric.kind.n_ignored(metric.state).tolist() == [2, 0]
    with pytest.raises(ValueError, match="`update` must get valid rows, got 2"):
        metric.compute()


TEXTS = np.array(["site b", "site a", ""])
KINDS = [
    lambda texts: texts,
    lambda texts: texts.tolist(),
    lambda texts: [text or None for text in texts.tolist()],
    lambda texts: pytest.importorskip("pandas").Series(texts).replace("", np.nan),
    lambda texts: pytest.importorskip("pandas").Categorical(texts),
]


@pytest.mark.parametrize("convert", KINDS)
def test_text_groups_are_numbered_in_sorted_order_or_by_the_given_names(convert):
    numbers = torch.tensor([1, 0, -1] * 30)
    texts = convert(TEXTS[[0, 1, 2] * 30])
    preds = torch.linspace(0, 1, 90)
    target = (preds > 0.4).long()
    values, expected = F.by_group(F.ece, preds, target, texts), F.by_group(F.ece, preds, target, numbers)
    torch.testing.assert_close(values, expected)
    assert values.group_names == ("site a", "site b")
    metric = tc.ByGroup(tc.ECE(task="binary"), group_names=["site a", "site b"])
    metric.update(preds, target, groups=texts)
    torch.testing.assert_close(metric.compute().float(), F.by_group(F.ece, preds, target, numbers))
    assert set(metric.worst().group) == {"site a", "site b"}
    report = tc.report(preds, target, groups=texts, with_calibration=False, with_intervals=False)
    assert set(report.groups.group) == {"site a", "site b"}
    with pytest.raises(ValueError, match="must be among `group_names`, got 'site c'"):
        metric.update(preds, target, groups=["site c"] * 90)
    with pytest.raises(TypeError, match="must be numbers for a metric without names of groups, got 'site a'"):
        tc.ByGroup(tc.ECE(task="binary"), num_groups=2).update(preds, target, groups=texts)


def test_thousands_of_groups_need_less_than_twice_their_size():
    """One group has a third of all samples, hundreds have one or none."""
    g = torch.Generator().manual_seed(0)
    n, num_groups = 40_000, 3_000
    groups = (torch.rand(n, generator=g) ** 9 * num_groups).long()
    sizes = groups.bincount(minlength=num_groups)
    assert sizes.max() > 0.3 * n
    assert (sizes <= 1).sum() > 500
    p = torch.rand(n, generator=g)
    y = (torch.rand(n, generator=g) < p).long()
    metric = tc.ByGroup(tc.KS(task="binary"), num_groups=num_groups)
    for piece in torch.arange(n).split(9_000):
        metric.update(p[piece], y[piece], groups=groups[piece])
    expected = F.by_group(F.ks, p, y, groups, task="binary", num_groups=num_groups)
    close(metric.compute(), expected.double(), rtol=1e-6, atol=1e-7)
    assert (metric.n() == sizes).all()
    seen = []
    for series, sample in metric.statistic().by_size():
        held = (~sample.score.isnan()).sum(-1)
        assert (held == sizes[series]).all()
        assert sample.score.shape[-1] == held.max() < 2 * max(1, held.min())
        seen += series.tolist()
    assert sorted(seen) == list(range(num_groups))


def test_sketches_and_soft_targets_by_group_equal_those_of_the_rows():
    g = torch.Generator().manual_seed(0)
    preds, shares = (torch.randn(80, 4, generator=g).softmax(-1) for _ in range(2))
    target, groups = torch.randint(0, 2, (80, 4), generator=g), random_groups(80)
    for labels, make in (
        (shares, partial(tc.NLL, task="multiclass", num_classes=4, normalize="prior")),
        (target, partial(tc.KS, task="multilabel", num_labels=4, resolution=64)),
    ):
        metric = updated(tc.ByGroup(make(), num_groups=N_GROUPS), (preds, labels), groups=groups)
        for k in set(range(N_GROUPS)) - {4}:
            alone = updated(make(), (preds[groups == k], labels[groups == k]))
            close(metric.compute()[k], alone.compute(), rtol=1e-5, atol=1e-6)
        close(metric.n(), groups.bincount(minlength=N_GROUPS).double(), rtol=1e-6)
    whole, sketch = (tc.ByGroup(tc.KS(task="binary", **how), num_groups=N_GROUPS) for how in ({}, {"resolution": 64}))
    p, y = torch.rand(80, generator=g), groups % 2  # a few groups have the smallest possible p-value
    tables = [updated(metric, (p, y), groups=groups).worst(n_replicates=19) for metric in (whole, sketch)]
    assert tables[0].group == tables[1].group
    assert tables[0].value == pytest.approx(tables[1].value, abs=0.02)


def test_collection_passes_groups_to_its_members_and_converts_input_once(monkeypatch):
    given = {"task": "multiclass", "num_classes": 4}
    alone = {"ece": tc.ECE(**given), "ks": tc.KS(**given)}
    alone |= {f"{name}_by": tc.ByGroup(metric, num_groups=N_GROUPS) for name, metric in alone.items()}
    metrics = tc.CalibrationCollection({name: metric.clone() for name, metric in alone.items()})
    reads = []
    original = InputFormat.read
    monkeypatch.setattr(InputFormat, "read", lambda *args, **kwargs: reads.append(1) or original(*args, **kwargs))
    preds, target = torch.randn(60, 4).softmax(-1), torch.randint(0, 4, (60,))
    groups = random_groups(60)
    metrics.update(preds[:30], target[:30], groups=groups[:30])
    assert set(metrics(preds[30:], target[30:], groups=groups[30:])) == set(metrics.keys())
    monkeypatch.undo()
    assert len(reads) == 2  # one per batch
    before = metrics.compute()
    for name, metric in alone.items():
        metric.update(preds, target, **({"groups": groups} if name.endswith("by") else {}))
        close(before[name], metric.compute())
    assert "num_groups=6" in repr(alone["ece_by"])


def miscalibrated_groups(metric, n, num_groups, off, seed=0):
    """Update a metric by group with calibrated data, except for groups whose outcomes are too frequent.

    Returns:
        The metric, predictions, outcomes and groups, of which group 4 is empty.
    """
    g = torch.Generator().manual_seed(seed)
    groups = (torch.rand(n, generator=g) ** 2 * num_groups).long()
    p = torch.rand(n, generator=g, dtype=torch.float64) * 0.6
    shift = torch.zeros(num_groups, dtype=torch.float64)
    shift[list(off)] = 0.3
    y = (torch.rand(n, generator=g) < p + shift[groups]).long()
    groups[groups == 4] = 0
    metric = updated(tc.ByGroup(metric, num_groups=num_groups), (p, y), groups=groups)
    return metric, p, y, groups


@pytest.mark.parametrize("cls", [tc.ECE, tc.ACE])
def test_calibration_test_of_each_group_is_that_of_its_rows(cls):
    make = partial(cls, task="binary", n_bins=5)
    metric, p, y, groups = miscalibrated_groups(make(), 600, 6, {2})
    found = metric.test(n_replicates=99)
    close(found.statistic, metric.compute())
    assert found.p_value[4].isnan()
    for k in (0, 2, 5):
        alone = calibration_test(make(), p[groups == k], y[groups == k], n_replicates=499)
        close(found.noise_floor[k], alone.noise_floor, rtol=0.25, atol=0)  # 5 standard errors of 99 replicates
        close(found.p_value[k], alone.p_value, rtol=0, atol=0.2)


@pytest.mark.parametrize("cls", [tc.ECE, tc.ESCE, tc.ACE])
def test_worst_groups_are_the_miscalibrated_ones(cls):
    # With other seeds, one of the 57 calibrated groups may differ by 3 standard deviations by chance.
    metric, _, _, groups = miscalibrated_groups(cls(task="binary", n_bins=5), 6_000, 60, {3, 20}, seed=1)
    table = metric.worst(8)
    assert set(table.group[:2]) == {3, 20}
    assert max(table.p_value[:2]) < 0.01
    assert min(table.p_value[2:]) > 0.05
    assert not any(table.not_significant[:2])
    assert table.n_groups == 59
    assert list(table.n) == groups.bincount()[list(table.group)].tolist()
    by_value = metric.worst(None, by="value")
    assert sorted(by_value.group) == sorted(set(range(60)) - {4})
    assert list(map(abs, by_value.value)) == sorted(map(abs, by_value.value), reverse=True)
    assert set(metric.worst(2, by="p_value").group) == {3, 20}
    assert "within chance" in str(by_value)
    tests = metric.test(n_replicates=199)[torch.tensor(by_value.group)]
    spread = (tests.high - tests.low) / (2 * NormalDist().inv_cdf(0.975))
    middle = (tests.low + tests.high) / 2
    close(torch.tensor(by_value.shrunk, dtype=torch.float64), shrunk_to_mean(middle, spread), atol=1e-12)
    assert table.to_dict()["group"] == list(table.group) == [row["group"] for row in table.rows()]


def test_shrunken_values_follow_the_random_effects_formula():
    values, errors = torch.tensor([[0.10, 0.12, 0.50, 0.05, torch.nan], [0.05, 0.01, 0.20, 0.03, 0.1]]).double()
    x, s = values[:4], errors[:4]
    w = 1 / s**2
    q = (w * (x - (w * x).sum() / w.sum()) ** 2).sum()
    tau2 = (q - 3) / (w.sum() - (w**2).sum() / w.sum())
    assert tau2 > 0
    of_mean = 1 / (tau2 + s**2)
    mean = (of_mean * x).sum() / of_mean.sum()
    found = shrunk_to_mean(values, errors)
    close(found[:4], mean + tau2 * of_mean * (x - mean), rtol=1e-9)
    assert found[4].isnan()


def test_adjusted_p_values_equal_scipy():
    stats = pytest.importorskip("scipy.stats")
    p = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    p[7] = p[8]
    close(benjamini_hochberg(p), torch.from_numpy(stats.false_discovery_control(p.numpy())))
    assert len(benjamini_hochberg(p[:0])) == 0


# Functions by group


MULTI = {"task": "multiclass", "from_logits": True}


def data():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 3, generator=g, dtype=torch.float64)
    return 3 * logits, torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(-1), torch.arange(300) % 4


def test_values_of_text_groups_are_a_tensor_with_names():
    preds = torch.tensor([0.9, 0.2, 0.6, 0.3], requires_grad=True)
    target, groups = torch.tensor([1, 0, 0, 1]), ["f", "m", "f", ""]
    values = F.by_group(F.brier_score, preds, target, groups)
    expected = F.by_group(F.brier_score, preds, target, torch.tensor([0, 1, 0, -1]))
    assert type(expected) is torch.Tensor
    assert repr(values) == "f: 0.185\nm: 0.04"
    assert torch.equal(values["m"], expected[1])
    assert values.to_pandas().to_dict() == pytest.approx({"f": 0.185, "m": 0.04})
    with pytest.raises(KeyError, match="must be one of the groups 'f', 'm', got 'x'"):
        values["x"]
    for operation in (
        torch.sum,
        torch.Tensor.mean,
        lambda x: x[0],
        lambda x: x.double() + 1,
        torch.stack((expected,)).add,
    ):
        assert type(operation(values)) is torch.Tensor
    gradients = [torch.autograd.grad(each.sum(), preds)[0] for each in (values, expected)]
    assert torch.equal(*gradients)
    assert deepcopy(values.detach()).tolist() == expected.tolist()
    assert deepcopy(F.by_group(F.brier_score, preds.detach(), target, groups)).group_names == ("f", "m")
    of_parts = F.by_group(F.corp, preds.detach(), target, groups, num_groups=3)
    assert of_parts.mcb.group_names == ("f", "m", "2")


def test_by_group_supports_tuples_batches_class_axes_and_weights():
    logits, target, groups = data()
    folds = torch.arange(300) // 4 % 5
    values = F.by_group(relative_calibration_loss, logits, target, groups, folds=folds, **MULTI)
    parts = F.by_group(F.corp, logits, target, groups, num_groups=6, **MULTI)
    for k in range(4):
        rows = groups == k
        close(values[k], relative_calibration_loss(logits[rows], target[rows], folds=folds[rows], **MULTI))
        close(parts.mcb[k], F.corp(logits[rows], target[rows], **MULTI).mcb)
    assert type(parts) is F.CORPDecomposition
    assert parts.unc[4:].isnan().all()
    annotator_counts = torch.nn.functional.one_hot(target, 3).double()
    by_group = partial(F.by_group, F.ece, groups=groups, **MULTI)
    one = by_group(logits, target)
    both = by_group(torch.stack((logits, -logits)), torch.stack((target, target)), batch_dims=1)
    assert both.shape == (4, 2)
    for found in (both[:, 0], *(by_group(logits.T, labels, class_axis=0) for labels in (target, annotator_counts.T))):
        close(found, one)
    close(by_group(logits, target, weights=torch.ones(5, 300)), one.unsqueeze(-1).expand(4, 5))


def test_error_within_a_group_names_the_group():
    logits, target, groups = data()
    groups[groups == 3] = 2
    groups[5] = 3

    def of_several(preds, target, **options):
        if len(target) < 2:
            raise ValueError("`target` must have at least 2 samples")
        return F.nll(preds, target, **options)

    with pytest.raises(ValueError, match="at least 2 samples") as raised:
        F.by_group(of_several, logits, target, groups, **MULTI)
    assert raised.value.__notes__ == ["in group 3 of size 1. Use group -1 for rows in groups that are too small."]


def test_empty_groups_are_nan():
    given = {"function": F.ece, "preds": torch.tensor([0.2, 0.7, 0.9]), "target": torch.tensor([0, 1, 1])}
    given |= {"groups": torch.tensor([0, 1, 2]), "task": "binary"}
    nothing = {name: value[:0] for name, value in given.items() if torch.is_tensor(value)}
    assert F.by_group(**{**given, **nothing}, num_groups=3).isnan().tolist() == [True] * 3


# SKCE by group: blocks are formed within each group of each update.

# Means of at most 200 blocks with values up to 2, in another order: 200 * 2 * 2.2e-16, with a margin
close_of_blocks = partial(close, rtol=1e-10)


@pytest.mark.parametrize("copies", [1, 3, 40])  # 40 copies of a row form whole blocks
@pytest.mark.parametrize("case", [case for case in CASES if case.in_blocks], ids=str)
def test_block_values_and_gradients_by_group_equal_the_function(case, copies):
    preds, target = case.data(n=120, lead=(2,))
    groups = torch.randint(-1, N_GROUPS - 1, (2, 120), generator=torch.Generator().manual_seed(0))
    groups = groups.masked_fill(groups == 2, 3)  # group 2 is empty, -1 is no group
    weights = None if copies == 1 else torch.arange(240).reshape(2, 120) * 7 % copies
    metric = tc.ByGroup(case.metric(batch_shape=(2,)), num_groups=N_GROUPS)
    mine, theirs = (preds.clone().requires_grad_() for _ in range(2))
    expected = []
    for k, b in itertools.product(range(N_GROUPS), range(2)):
        rows = groups[b] == k
        own = None if weights is None else weights[b, rows]
        expected.append(case.call(theirs[b, rows], target[b, rows], weights=own))
    expected = torch.stack(expected).reshape(N_GROUPS, 2)
    value = metric(mine, target, groups=groups, weights=weights)
    close_of_blocks(value, expected)
    held = ~expected.isnan()
    value[held].sum().backward()
    expected[held].sum().backward()
    close_of_blocks(mine.grad, theirs.grad)
    if copies == 1:
        sizes = torch.stack([(groups == k).sum(-1) for k in range(N_GROUPS)])
        close_of_blocks(metric.n(), (sizes // case.options.get("block_size", 2)).double())  # n is the number of blocks
    for n in (0, 1):  # fewer than a block
        metric.update(preds[:, :n], target[:, :n], groups=groups[:, :n])
    other = tc.ByGroup(case.metric(batch_shape=(2,)), num_groups=N_GROUPS)
    other.update(preds, target, groups=groups, weights=weights)
    metric.merge_state(other)  # the same blocks again
    close_of_blocks(metric.compute(), expected)


def test_large_weights_take_no_memory():
    """Blocks of copies of one row are counted instead of formed: each has h = |r|^2, for any kernel."""
    p = torch.tensor([0.2, 0.5], dtype=torch.float64)
    metric = tc.ByGroup(tc.SKCE(task="binary", estimator="block"), num_groups=2)
    metric.update(p, torch.ones(2, dtype=torch.int64), groups=torch.arange(2), weights=torch.tensor([32 * 10**10, 64]))
    assert metric.n().tolist() == [10**10, 2]
    close_of_blocks(metric.compute(), 2 * (1 - p) ** 2)


def test_groups_with_different_numbers_of_bins_have_nan_at_the_end():
    generator = torch.Generator().manual_seed(0)
    preds, groups = torch.rand(90, generator=generator), torch.arange(90) % 4 % 3
    target = torch.bernoulli(preds, generator=generator).long()
    edges = F.by_group(F.optimal_bins, preds, target, groups)
    alone = [F.optimal_bins(preds[groups == k], target[groups == k]) for k in range(3)]
    assert len({len(each) for each in alone}) > 1
    for found, expected in zip(edges, alone, strict=True):
        torch.testing.assert_close(found[: len(expected)], expected)
        assert found[len(expected) :].isnan().all()
    with pytest.raises(TypeError, match=r"got BinTable\. Call it with the rows of each group"):
        F.by_group(F.calibration_curve, preds, target, groups)

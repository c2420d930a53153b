"""Metrics by group: every value is that of the metric over the rows of the group alone, however the rows came."""

import itertools
import pickle

import pytest
import torch
from cases import CASES, covering, formula_of, path_of
from helpers.each import check_each

import torchcalib as tc
from torchcalib.kernels.bin_sums import cell_sums

NAMES = ("nce-multiclass-logits", "ece-multiclass-classwise", "ece-per-label", "tce-multilabel-classwise", "ace-binary")
SOME = [case for case in CASES if str(case).startswith(NAMES)]
some_cases = pytest.mark.parametrize("case", SOME, ids=str)
# Blocks of SKCE are cut in each update: test_blocks.py.
IN_PIECES = [case for case in CASES if not case.in_blocks]
path = pytest.mark.parametrize("case", list(covering(IN_PIECES, lambda case: {path_of(case)})))
formula = pytest.mark.parametrize("case", list(covering(IN_PIECES, lambda case: {formula_of(case)})))


def test_sums_that_cannot_be_split_by_group_are_refused():
    class Total(tc.NLL):
        def __init__(self):
            super().__init__(task="binary")
            object.__setattr__(self.kind, "recipe", object())

    with pytest.raises(ValueError, match="`metric` must keep sums that can be split by group, or samples, got"):
        tc.ByGroup(Total(), num_groups=2)


def close(a, b, **tolerance):
    torch.testing.assert_close(a, b, **{"rtol": 1e-12, "atol": 1e-12, **tolerance}, equal_nan=True)


def some_groups(n, num_groups=6, seed=1):
    """Numbers of groups of which one is empty, and the first has most samples."""
    g = torch.Generator().manual_seed(seed)
    groups = (torch.rand(n, generator=g) ** 2 * num_groups).long()
    return groups.masked_fill(groups == num_groups - 2, 0)


def loop(case, preds, target, groups, num_groups, weights=None, dim=0):
    """The function over the rows of each group, one group after the other."""
    values = []
    for k in range(num_groups):
        rows = groups == k
        given = {} if weights is None else {"weights": weights[rows]}
        values.append(case.call(preds[rows], target[rows], **given))
    return torch.stack(values)


def by_group_of(case, num_groups=6, **kwargs):
    return tc.ByGroup(case.metric(**kwargs), num_groups=num_groups)


@path
def test_groups_are_a_loop_over_groups_in_pieces_weighted_and_merged(case):
    preds, target = case.data(n=90)
    groups, weights = some_groups(90), case.weights(90)
    one, other = by_group_of(case), by_group_of(case)
    for metric, piece in ((one, slice(0, 1)), (one, slice(1, 1)), (other, slice(1, 50)), (one, slice(50, 90))):
        metric.update(preds[piece], target[piece], groups=groups[piece], weights=weights[piece])
    one.merge_state(other)
    values = one.compute()
    assert len(values) == 6
    assert values[4].isnan().all()
    close(values, loop(case, preds, target, groups, 6, weights).double())


@formula
def test_forward_is_the_value_of_the_batch_by_group_with_its_gradient(case):
    preds, target = case.data(n=40)
    groups = some_groups(40)
    metric = by_group_of(case)
    metric.update(preds, target, groups=groups)
    a, b = (preds.clone().requires_grad_() for _ in range(2))
    value, expected = metric(a, target, groups=groups), loop(case, b, target, groups, 6).double()
    close(value, expected)
    twice = [torch.cat((x, x)) for x in (preds, target, groups)]
    close(metric.compute(), loop(case, *twice, 6).double())
    if case.differentiable:
        held = [k for k in range(6) if k != 4]
        value[held].sum().backward()
        expected[held].sum().backward()
        close(a.grad, b.grad)


@some_cases
def test_pickled_cloned_saved_and_loaded_it_goes_on(case):
    preds, target = case.data(n=60)
    groups = some_groups(60)
    metric = tc.ByGroup(case.metric(), num_groups=6, persistent=True)
    metric.update(preds[:20], target[:20], groups=groups[:20])
    loaded = tc.ByGroup(case.metric(), num_groups=6, persistent=True)
    loaded.load_state_dict(metric.state_dict())
    for copy in (pickle.loads(pickle.dumps(metric)), metric.clone(), loaded, metric.to(torch.bfloat16)):
        copy.update(preds[20:], target[20:], groups=groups[20:])
        close(copy.compute(), loop(case, preds, target, groups, 6).double())
    metric.reset()
    assert metric.n().eq(0).all()


@some_cases
def test_a_state_of_other_groups_is_refused(case):
    metric = tc.ByGroup(case.metric(), num_groups=6, persistent=True)
    with pytest.raises(ValueError, match="must count the same thing, got num_groups=7 into num_groups=6"):
        metric.merge_state(tc.ByGroup(case.metric(), num_groups=7))
    with pytest.raises(ValueError, match="num_groups=None into num_groups=6"):
        metric.load_state_dict(case.metric(persistent=True).state_dict())


def test_saved_numbers_of_groups_that_there_are_not_are_damage():
    metric = tc.ByGroup(tc.KS(task="binary"), num_groups=3, persistent=True)
    metric.update(torch.rand(4), torch.ones(4).long(), groups=torch.tensor([0, 1, 2, 2]))
    saved = metric.state_dict()
    for wrong in ([0, 1, 2, 3], [0, -1, 2, 2], [0, 1, 2]):
        with pytest.raises(ValueError, match="damaged"):
            metric.load_state_dict({**saved, "groups": [torch.tensor(wrong, dtype=torch.int32)]})


@some_cases
def test_series_of_a_batch_keep_their_own_groups(case):
    preds, target = case.data(n=60, lead=(2, 3))
    groups = some_groups(360).reshape(2, 3, 60)
    metric = by_group_of(case, batch_shape=(2, 3))
    metric.update(preds, target, groups=groups)
    values, n = metric.compute(), metric.n()
    assert values.shape[:3] == (6, 2, 3)
    for i in range(2):
        for j in range(3):
            close(values[:, i, j], loop(case, preds[i, j], target[i, j], groups[i, j], 6).double())
            assert n[:, i, j].tolist() == groups[i, j].bincount(minlength=6).tolist()


@pytest.mark.parametrize("cls", [tc.ECE, tc.KS, tc.NLL])
def test_pixels_have_groups_of_their_own(cls):
    preds = torch.randn(2, 3, 5, 4).softmax(1)
    target, groups = torch.randint(0, 3, (2, 5, 4)), torch.randint(0, 2, (2, 5, 4))
    metric = tc.ByGroup(cls(task="multiclass", num_classes=3, class_axis=1), num_groups=2)
    metric.update(preds, target, groups=groups)
    for k in range(2):
        alone = cls(task="multiclass", num_classes=3)
        alone.update(preds.movedim(1, -1)[groups == k], target[groups == k])
        close(metric.compute()[k], alone.compute())


@some_cases
def test_rows_of_no_group_and_rows_left_out_count_nowhere(case):
    preds, target = case.data(n=60)
    groups = some_groups(60)
    spoiled, labels, numbers, weights = preds.clone(), target.clone(), groups.clone(), torch.ones(60).long()
    numbers[3] = -1
    numbers[7], spoiled[7], weights[7] = 99, torch.nan, 0
    numbers[11], labels[11] = -5, -100
    spoiled[12] = torch.nan
    numbers[12] = 99
    keep = torch.ones(60, dtype=torch.bool)
    keep[[3, 7, 11, 12]] = False
    metric = tc.ByGroup(case.metric(ignore_index=-100, nan_policy="drop"), num_groups=6)
    metric.update(spoiled, labels, groups=numbers, weights=weights)
    close(metric.compute(), loop(case, preds[keep], target[keep], groups[keep], 6).double())
    assert metric.n_dropped() == (4 if case.task == "multilabel" else 1)
    assert metric.n().tolist() == groups[keep].bincount(minlength=6).tolist()


def test_a_number_of_no_group_is_an_error_and_changes_nothing():
    table = itertools.product((tc.NLL, tc.ECE, tc.KS), (6, -2, 2**40))
    check_each(table, lambda pair: is_an_error_and_changes_nothing(*pair))


def is_an_error_and_changes_nothing(cls, wrong):
    metric = tc.ByGroup(cls(task="binary"), num_groups=6)
    p, y = torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1])
    metric.update(p, y, groups=torch.tensor([0, 5, 5]))
    before = metric.compute()
    with pytest.raises(ValueError, match=rf"`groups` must be numbers in \[0, 5\].* got {wrong} \(1 of 3 rows\)"):
        metric.update(p, y, groups=torch.tensor([1, wrong, 2]))
    close(metric.compute(), before)
    trusting = tc.ByGroup(cls(task="binary", validate_args=False), num_groups=6)
    trusting.update(p, y, groups=torch.tensor([1, wrong, 2]))  # nothing outside of the state is written
    assert trusting.n().sum() == 3


@pytest.mark.parametrize(
    ("groups", "error", "said"),
    [
        ([0, 1, 2], TypeError, "`groups` must be a tensor of integers, got list"),
        (torch.zeros(3), TypeError, "`groups` must be a tensor of integers, got dtype torch.float32"),
        (torch.zeros(2).long(), ValueError, r"`groups` must have one number per sample, shape \(3,\), got \(2,\)"),
        (torch.zeros(3, 1).long(), ValueError, "`groups` must have one number per sample"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), ValueError, "`groups` must be on the device of `preds`"),
    ],
)
def test_what_is_no_number_for_each_sample_is_refused(groups, error, said):
    metric = tc.ByGroup(tc.ECE(task="binary"), num_groups=4)
    with pytest.raises(error, match=said):
        metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), groups=groups)
    with pytest.raises(TypeError, match="groups"):
        metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))


def test_what_is_wrapped_is_a_metric_that_wraps_none():
    with pytest.raises(TypeError, match="must be a torchcalib metric, got function"):
        tc.ByGroup(tc.ece, num_groups=2)
    for wrapped in (tc.Bootstrapped(tc.NLL(task="binary")), tc.ByGroup(tc.NLL(task="binary"), num_groups=2)):
        with pytest.raises(ValueError, match="must be a metric that wraps no other"):
            tc.ByGroup(wrapped, num_groups=2)
        with pytest.raises(ValueError, match="`metric` must have sums as its state"):
            tc.Bootstrapped(tc.ByGroup(tc.NLL(task="binary"), num_groups=2))
    for wrong, error in ((0, ValueError), (2**31, ValueError), (2.0, TypeError)):
        with pytest.raises(error, match="num_groups"):
            tc.ByGroup(tc.NLL(task="binary"), num_groups=wrong)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool])
def test_integers_of_any_width_are_numbers(dtype):
    p, y = torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1])
    metric = tc.ByGroup(tc.ECE(task="binary"), num_groups=2)
    metric.update(p, y, groups=torch.tensor([0, 1, 1]).to(dtype))
    close(metric.compute(), torch.tensor([0.2, 0.2], dtype=torch.float64), rtol=1e-6)


@pytest.mark.parametrize("cls", [tc.ECE, tc.KS, tc.ACE, tc.NLL])
def test_thousands_of_groups_of_very_different_sizes(cls):
    """One group holds half of all samples, hundreds hold one or none: no group is padded to the largest."""
    g = torch.Generator().manual_seed(0)
    n, num_groups = 40_000, 3_000
    groups = (torch.rand(n, generator=g) ** 9 * num_groups).long()
    sizes = groups.bincount(minlength=num_groups)
    assert sizes.max() > 0.3 * n
    assert (sizes <= 1).sum() > 500
    p = torch.rand(n, generator=g)
    y = (torch.rand(n, generator=g) < p).long()
    metric = tc.ByGroup(cls(task="binary"), num_groups=num_groups)
    for piece in torch.arange(n).split(9_000):
        metric.update(p[piece], y[piece], groups=groups[piece])
    values = metric.compute()
    assert (metric.n() == sizes).all()
    assert (values.isnan() == (sizes == 0)).all()
    function = getattr(tc, cls.__name__.lower())
    for k in [*range(5), *range(1000, 1050), int(sizes.argmax()), num_groups - 1]:
        rows = groups == k
        if rows.any():
            close(values[k], function(p[rows], y[rows], task="binary").double(), rtol=1e-6, atol=1e-7)


def test_groups_of_samples_are_padded_to_less_than_twice_what_they_hold():
    g = torch.Generator().manual_seed(0)
    groups = (torch.rand(5_000, generator=g) ** 6 * 400).long()
    metric = tc.ByGroup(tc.KS(task="binary"), num_groups=401)
    metric.update(torch.rand(5_000, generator=g), torch.zeros(5_000).long(), groups=groups)
    seen = []
    for series, sample in metric.statistic().by_size():
        held = (~sample.score.isnan()).sum(-1)
        assert (held == groups.bincount(minlength=401)[series]).all()
        assert sample.score.shape[-1] == held.max() < 2 * max(1, held.min())
        seen += series.tolist()
    assert sorted(seen) == list(range(401))


@pytest.mark.parametrize("resolution", [None, 64])
def test_a_sketch_of_every_group_reads_as_the_sketch_of_its_rows(resolution):
    case = next(c for c in CASES if str(c) == "ks-multilabel-classwise")
    preds, target = case.data(n=80)
    groups = some_groups(80)
    metric = by_group_of(case, resolution=resolution)
    metric.update(preds, target, groups=groups)
    for k in range(6):
        alone = case.metric(resolution=resolution)
        alone.update(preds[groups == k], target[groups == k])
        close(metric.compute()[k], alone.compute())


def test_soft_targets_by_class_and_by_group():
    g = torch.Generator().manual_seed(0)
    preds, votes = (torch.randn(50, 4, generator=g).softmax(-1) for _ in range(2))
    groups = some_groups(50)
    metric = tc.ByGroup(tc.NLL(task="multiclass", num_classes=4, normalize="prior"), num_groups=6)
    metric.update(preds, votes, groups=groups)
    expected = torch.stack(
        [tc.nll(preds[groups == k], votes[groups == k], task="multiclass", normalize="prior") for k in range(6)]
    )
    close(metric.compute(), expected.double(), rtol=1e-5, atol=1e-6)


def test_a_collection_hands_groups_to_those_that_take_them_and_reads_once(monkeypatch):
    from torchcalib.predictions import InputFormat

    given = {"task": "multiclass", "num_classes": 4}
    metrics = tc.CalibrationCollection(
        {
            "ece": tc.ECE(**given),
            "ece_by": tc.ByGroup(tc.ECE(**given), num_groups=6),
            "mce_by": tc.ByGroup(tc.MCE(**given), num_groups=6),
            "ks_by": tc.ByGroup(tc.KS(**given), num_groups=6),
            "ks": tc.KS(**given),
        }
    )
    reads = []
    original = InputFormat.read
    monkeypatch.setattr(InputFormat, "read", lambda *args, **kwargs: reads.append(1) or original(*args, **kwargs))
    preds, target = torch.randn(60, 4).softmax(-1), torch.randint(0, 4, (60,))
    groups = some_groups(60)
    metrics.update(preds[:30], target[:30], groups=groups[:30])
    values = metrics(preds[30:], target[30:], groups=groups[30:])
    assert set(values) == set(metrics.keys())
    monkeypatch.undo()
    assert len(reads) == 2  # one for each batch
    for name, cls in (("ece", tc.ECE), ("ks", tc.KS)):
        metric, alone = tc.ByGroup(cls(**given), num_groups=6), cls(**given)
        metric.update(preds, target, groups=groups)
        alone.update(preds, target)
        close(metrics.compute()[f"{name}_by"], metric.compute())
        close(metrics.compute()[name], alone.compute())
    before = metrics.compute()
    with pytest.raises(ValueError, match="`groups` must be numbers"):
        metrics.update(preds, target, groups=groups + 1)
    close(metrics.compute(), before)
    with pytest.raises(TypeError, match="groups"):
        metrics.update(preds, target)


def test_samples_by_group_are_4_bytes_more_each():
    metric, alone = tc.ByGroup(tc.KS(task="binary"), num_groups=6), tc.KS(task="binary")
    p, y = torch.rand(1000), torch.zeros(1000).long()
    metric.update(p, y, groups=torch.arange(1000) % 6)
    alone.update(p, y)

    def held(state):
        return sum(chunk.numel() * chunk.element_size() for part in state[:-1] for chunk in part)

    assert held(metric.state) == held(alone.state) + 4 * 1000


def test_what_the_caller_does_to_the_numbers_afterwards_changes_nothing():
    for cls in (tc.KS, tc.ECE):
        metric = tc.ByGroup(cls(task="binary"), num_groups=2)
        groups = torch.zeros(3, dtype=torch.int32)
        metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), groups=groups)
        groups.fill_(1)
        assert metric.n().tolist() == [3, 0]


def test_it_is_known_as_what_it_wraps():
    metric = tc.ByGroup(tc.TCE(task="binary"), num_groups=3)
    assert (metric.unit, metric.question, metric.higher_is_better) == (tc.TCE.unit, tc.TCE.question, False)
    assert not metric.is_differentiable
    assert "num_groups=3" in repr(metric)
    assert not list(metric.children())


def test_numbers_for_no_group_that_came_on_another_device_are_counted_and_told(monkeypatch):
    """As on CUDA, where no update waits to look: the row is left out and `compute` raises."""
    metric = tc.ByGroup(tc.ECE(task="binary"), num_groups=3)
    monkeypatch.setattr(tc.ByGroup, "_drops_invalid", True)
    p, y = torch.tensor([0.2, torch.nan, 0.9, 0.5]), torch.tensor([0, 1, 1, 0])
    metric.update(p, y, groups=torch.tensor([0, 7, 7, -1]))
    assert metric.kind.left_out(metric.state).tolist() == [2, 0]
    with pytest.raises(ValueError, match="`update` must get valid rows, got 2"):
        metric.compute()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_sums_over_cells_are_those_of_a_loop(requires_grad):
    g = torch.Generator().manual_seed(0)
    index = torch.randint(0, 5, (2, 3, 40), generator=g)
    columns = torch.randn(2, 3, 4, 40, generator=g, dtype=torch.float64).requires_grad_(requires_grad)
    expected = torch.zeros(2, 3, 4, 7, dtype=torch.float64)
    for i in range(2):
        for j in range(3):
            for f in range(4):
                for k in range(40):
                    expected[i, j, f, index[i, j, k]] += columns[i, j, f, k].detach()
    sums = cell_sums(index, columns, 7)
    close(sums.detach(), expected)
    close(cell_sums(index[0, 0], columns[0, 0], 7).detach(), expected[0, 0])
    assert cell_sums(index[..., :0], columns[..., :0], 7).eq(0).all()
    assert sums.requires_grad == requires_grad


def biased(n, num_groups, off, seed=0):
    """Calibrated but for groups in which outcomes are more frequent than predicted."""
    g = torch.Generator().manual_seed(seed)
    groups = (torch.rand(n, generator=g) ** 2 * num_groups).long()
    p = torch.rand(n, generator=g, dtype=torch.float64) * 0.6
    shift = torch.zeros(num_groups, dtype=torch.float64)
    shift[list(off)] = 0.3
    return p, (torch.rand(n, generator=g) < p + shift[groups]).long(), groups


@pytest.mark.parametrize("make", [lambda: tc.ECE(task="binary", n_bins=5), lambda: tc.ACE(task="binary", n_bins=5)])
def test_evidence_of_groups_is_that_of_each_alone(make):
    p, y, groups = biased(600, 6, {2})
    groups[groups == 4] = 0
    metric = tc.ByGroup(make(), num_groups=6)
    metric.update(p, y, groups=groups)
    found = metric.evidence(n_replicates=99)
    close(found.value, metric.compute())
    assert found.p_value[4].isnan()
    for k in (0, 2, 5):
        alone = tc.evidence(make(), p[groups == k], y[groups == k], n_replicates=499)
        close(found.noise_floor[k], alone.noise_floor, rtol=0.25, atol=0)  # 99 replicates: 5 standard errors
        close(found.p_value[k], alone.p_value, rtol=0, atol=0.2)


@pytest.mark.parametrize("cls", [tc.ECE, tc.ESCE, tc.ACE])
def test_the_worst_groups_are_those_that_chance_does_not_explain(cls):
    # Of other data one of the 58 calibrated groups is off by 3 standard deviations by chance, and said to be.
    p, y, groups = biased(6_000, 60, {3, 20}, seed=1)
    metric = tc.ByGroup(cls(task="binary", n_bins=5), num_groups=60)
    metric.update(p, y, groups=groups)
    table = metric.worst(8)
    assert set(table.group[:2]) == {3, 20}
    assert max(table.p_value[:2]) < 0.01
    assert min(table.p_value[2:]) > 0.05
    assert not any(table.by_chance[:2])
    assert table.n_groups == 60
    assert list(table.n) == groups.bincount()[list(table.group)].tolist()
    by_value = metric.worst(None, by="value")
    assert sorted(by_value.group) == list(range(60))
    assert list(map(abs, by_value.value)) == sorted(map(abs, by_value.value), reverse=True)
    assert set(metric.worst(2, by="p_value").group) == {3, 20}
    assert "within chance" in str(by_value)
    assert table.to_dict()["group"] == list(table.group)
    assert [row["group"] for row in table.rows()] == list(table.group)


def test_small_groups_are_drawn_to_the_mean_and_large_ones_stay():
    p, y, groups = biased(6_000, 60, set())
    groups[:2000] = 0
    metric = tc.ByGroup(tc.ECE(task="binary", n_bins=5), num_groups=60)
    metric.update(p, y, groups=groups)
    table = metric.worst(None)
    value, shrunk = torch.tensor(table.value), torch.tensor(table.shrunk)
    assert shrunk.std() < 0.5 * value.std()  # all are calibrated: what they differ by is noise
    assert sum(table.by_chance) > 50


def test_shrinking_is_the_formula_of_its_source_in_a_loop():
    from torchcalib.subgroups.table import shrunk_to_mean

    x = [0.10, 0.12, 0.50, 0.05, float("nan")]
    s = [0.05, 0.01, 0.20, 0.03, 0.1]
    pairs = list(zip(x[:4], s[:4], strict=True))
    w = [1 / si**2 for _, si in pairs]
    fixed = sum(wi * xi for wi, (xi, _) in zip(w, pairs, strict=True)) / sum(w)
    q = sum(wi * (xi - fixed) ** 2 for wi, (xi, _) in zip(w, pairs, strict=True))
    tau2 = max(0, (q - 3) / (sum(w) - sum(wi**2 for wi in w) / sum(w)))
    assert tau2 > 0
    mean = sum(xi / (tau2 + si**2) for xi, si in pairs) / sum(1 / (tau2 + si**2) for _, si in pairs)
    expected = [mean + tau2 / (tau2 + si**2) * (xi - mean) for xi, si in pairs]
    found = shrunk_to_mean(torch.tensor(x, dtype=torch.float64), torch.tensor(s, dtype=torch.float64))
    close(found[:4], torch.tensor(expected, dtype=torch.float64), rtol=1e-9)
    assert found[4].isnan()


def test_adjusted_p_values_are_those_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    from torchcalib.subgroups.table import adjusted_p_values

    p = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    p[7] = p[8]
    close(adjusted_p_values(p), torch.from_numpy(stats.false_discovery_control(p.numpy())))
    assert len(adjusted_p_values(p[:0])) == 0


def test_scores_have_no_noise_floor_and_worst_groups_need_one_value_each():
    p, y, groups = biased(60, 3, set())
    metric = tc.ByGroup(tc.NLL(task="binary"), num_groups=3)
    metric.update(p, y, groups=groups)
    with pytest.raises(TypeError, match="must be a calibration error to have a noise floor, got NLL"):
        metric.worst()
    metric = tc.ByGroup(tc.ECE(task="multilabel", num_labels=2, average=None), num_groups=3)
    metric.update(torch.stack((p, p), -1), torch.stack((y, y), -1), groups=groups)
    with pytest.raises(ValueError, match=r"must have one value for each group, got shape \(3, 2\)"):
        metric.worst(n_replicates=39)
    metric = tc.ByGroup(tc.ECE(task="binary"), num_groups=3)
    metric.update(p, y, groups=groups)
    with pytest.raises(ValueError, match="`by` must be one of 'excess', 'value', 'shrunk', 'p_value', got 'n'"):
        metric.worst(by="n", n_replicates=39)
    assert len(tc.ByGroup(tc.ECE(task="binary"), num_groups=3).evidence(n_replicates=39).value) == 3

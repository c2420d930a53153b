"""Order-based metrics against slow loops, closed forms and laws; recorded values are in test_ranked_golden."""

import math
from itertools import pairwise

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ranked as oracle

import torchcalib as tc
from torchcalib.kernels import ranking

F64 = torch.float64
N_CLASSES = 4
KINDS = ["pava_bc", "pava", "equal_mass", "equal_width", [0, 0.125, 0.25, 0.75, 1]]
NORMS = ["l1", "l2", "max"]
SETTINGS = [
    ("binary", {"reduction": "positive_class"}),
    ("binary", {"reduction": "top_label"}),
    ("multiclass", {"reduction": "top_label"}),
    ("multiclass", {"reduction": "classwise"}),
    ("multiclass", {"reduction": tc.TopK(2)}),
    ("multiclass", {"positive_classes": [0, 2]}),
    ("multilabel", {}),
]
setting = pytest.mark.parametrize(("task", "how"), SETTINGS, ids=str)


def sample(task, n=60, seed=0, weighted=False, heaviest=3):
    """Predictions in steps of 1/64, so that there are ties and sums are exact; targets that follow them; weights."""
    generator = torch.Generator().manual_seed(seed)
    if task == "multiclass":
        votes = torch.randint(0, N_CLASSES, (n, 64), generator=generator)
        votes = torch.where(torch.rand(n, 64, generator=generator) < 0.5, votes[:, :1], votes)
        preds = torch.nn.functional.one_hot(votes, N_CLASSES).sum(1).to(F64) / 64
        target = torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    else:
        shape = (n, N_CLASSES) if task == "multilabel" else (n,)
        preds = torch.randint(0, 65, shape, generator=generator).to(F64) / 64
        target = (torch.rand(shape, generator=generator) < 0.3 + 0.5 * preds).long()
    weights = torch.randint(0, heaviest + 1, (n,), generator=generator) if weighted else None
    return preds, target, weights


def distinct(task, n=24, seed=0):
    """Predictions that stay apart, for derivatives."""
    generator = torch.Generator().manual_seed(seed)
    if task == "multiclass":
        preds = torch.rand(n, N_CLASSES, generator=generator, dtype=F64).add(0.1)
        preds = preds / preds.sum(-1, keepdim=True)
        return preds, torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    shape = (n, N_CLASSES) if task == "multilabel" else (n,)
    preds = torch.rand(shape, generator=generator, dtype=F64) * 0.9 + 0.05
    return preds, (torch.rand(shape, generator=generator) < preds).long()


def looped(loop, task, how, preds, target, weights=None):
    """The loop over each pair of columns that the reduction makes."""
    columns = oracle.events(task, how.get("reduction"), preds.tolist(), target.tolist(), how.get("positive_classes"))
    weights = None if weights is None else weights.tolist()
    return [loop(confidence, outcome, weights) for confidence, outcome in columns]


def assert_slow_loop(function, loop, task, how, data, **options):
    """Both the value of every class or label, where there are several, and their mean."""
    preds, target, weights = data
    values = looped(loop, task, how, preds, target, weights)
    given = {"task": task, "weights": weights, **how, **options}
    found = function(preds, target, **given)
    assert found.item() == pytest.approx(sum(values) / len(values), rel=1e-11, abs=1e-12)
    if len(values) > 1:
        assert function(preds, target, average=None, **given).tolist() == pytest.approx(values, rel=1e-11, abs=1e-12)


def equal_mass_rows(scores, outcomes, weights, n_bins=7):
    return oracle.rows_of(
        oracle.blocks_of("equal_mass", scores, outcomes, weights, n_bins=n_bins), scores, outcomes, weights
    )


def component(name, score):
    """One part of the CORP decomposition, from the function and from the loop."""

    def function(preds, target, **options):
        return getattr(tc.corp(preds, target, score=score, **options), name)

    def loop(scores, outcomes, weights=None):
        return oracle.corp(score, scores, outcomes, weights)[["score", "mcb", "dsc", "unc"].index(name)]

    return function, loop


# Function, its options, and its slow loop over scores, outcomes and weights.
BINNED = {
    "ace": (tc.ace, {"n_bins": 7}, lambda *columns: oracles.ece(equal_mass_rows(*columns))),
    "mce": (tc.mce, {"bins": "equal_mass", "n_bins": 7}, lambda *columns: oracles.mce(equal_mass_rows(*columns))),
    "rmsce": (tc.rmsce, {"bins": "equal_mass", "n_bins": 7}, lambda *columns: oracles.rmsce(equal_mass_rows(*columns))),
    "debiased": (tc.rmsce, {"bins": "equal_mass", "n_bins": 7, "debiased": True},
                 lambda *columns: oracles.rmsce(equal_mass_rows(*columns), debiased=True)),
    "ks": (tc.ks, {}, oracle.ks),
}  # fmt: skip
CORP = [(score, name) for score in ("brier", "nll") for name in ("score", "mcb", "dsc", "unc")]


# Slow loops.


@setting
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", BINNED)
def test_slow_loop_value(name, weighted, task, how):
    function, options, loop = BINNED[name]
    for seed in range(3):
        assert_slow_loop(function, loop, task, how, sample(task, seed=seed, weighted=weighted), **options)


@setting
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("score", "name"), CORP)
def test_slow_loop_corp(score, name, weighted, task, how):
    preds, target, weights = sample(task, n=40, weighted=weighted)
    preds = preds * 0.875 + 0.125 / (N_CLASSES if task == "multiclass" else 2)  # no zeros: no infinite scores
    function, loop = component(name, score)
    assert_slow_loop(function, loop, task, how, (preds, target, weights))


@setting
@pytest.mark.parametrize("weighted", [False, True])
def test_slow_loop_ace_with_split_ties(weighted, task, how):
    data = sample(task, weighted=weighted, heaviest=1)
    assert_slow_loop(
        tc.ace, lambda *columns: oracle.ace(*columns, n_bins=7, ties="split"), task, how, data, n_bins=7, ties="split"
    )


@setting
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bins", KINDS, ids=str)
def test_slow_loop_tce(bins, norm, task, how):
    for weighted in (False, True):
        data = sample(task, weighted=weighted)
        assert_slow_loop(
            tc.tce, lambda *columns: oracle.tce(bins, *columns, n_bins=5, norm=norm), task, how, data,
            bins=bins, n_bins=5, norm=norm,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("bins", "options"),
    [
        ("pava_bc", {"n_min": 3, "n_max": 9}),
        ("pava_bc", {"n_min": 5, "n_max": 30, "variant": "paper"}),
        ("pava_bc", {"n_min": 5, "n_max": 30, "ties": "split"}),
        ("pava", {"ties": "split"}),
        ("equal_mass", {"n_bins": 4, "ties": "split"}),
        ("equal_width", {"n_bins": 8, "right": True}),
        ([0, 0.25, 0.5, 1], {"right": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("decision", [{"alpha": 0.2}, {"alpha": 0.01}, {"test": "t"}], ids=str)
def test_slow_loop_tce_options(bins, options, decision):
    for seed in range(3):
        assert_slow_loop(
            tc.tce, lambda *columns: oracle.tce(bins, *columns, **options, **decision), "binary", {},
            sample("binary", n=90, seed=seed), bins=bins, **options, **decision,
        )  # fmt: skip


@pytest.mark.parametrize("bins", KINDS, ids=str)
def test_slow_loop_tce_of_t_tests_with_weights(bins):
    """A weight counts as copies here too. Undecided, and so kept: one sample, or labels all alike that p meets."""
    data = sample("binary", n=90, weighted=True)
    assert_slow_loop(
        tc.tce, lambda *columns: oracle.tce(bins, *columns, test="t"), "binary", {}, data, bins=bins, test="t"
    )


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bins", KINDS, ids=str)
def test_slow_loop_gce(bins, norm):
    """A loss of all three quantities of a bin."""

    def loss(n, confidence, frequency):
        return (frequency - confidence) ** 2 / (1 + n)

    def loop(*columns):
        return oracle.gce(loss, oracle.rows_of(oracle.blocks_of(bins, *columns, n_bins=5), *columns), norm)

    for task, how in SETTINGS:
        assert_slow_loop(
            tc.gce, loop, task, how, sample(task, weighted=True), bins=bins, n_bins=5, norm=norm,
            loss=lambda b: b.gap.square() / (1 + b.n),
        )  # fmt: skip


@pytest.mark.parametrize("bins", KINDS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_slow_loop_tce_table(bins, weighted):
    preds, target, weights = sample("binary", n=90, weighted=weighted)
    columns = preds.tolist(), target.tolist(), None if weights is None else weights.tolist()
    table = tc.tce_table(preds, target, task="binary", bins=bins, n_bins=6, weights=weights)
    blocks = oracle.blocks_of(bins, *columns, n_bins=6)
    held = table.n > 0
    found = [table.n, table.confidence, table.frequency, table.gap, table.share, table.rejected]
    found = zip(*(column[held].tolist() for column in found), strict=True)
    counts = oracle.rejected(blocks, *columns)
    total = 90 if weights is None else int(weights.sum())
    for row, (_, n, confidence, frequency, _), count in zip(
        found, oracle.rows_of(blocks, *columns), counts, strict=True
    ):
        assert row == pytest.approx((n, confidence, frequency, frequency - confidence, n / total, count), abs=1e-12)
    if bins in ("pava", "pava_bc"):
        ordered = [sorted(preds[block].tolist()) for block in blocks]
        middle = [(a[-1] + b[0]) / 2 for a, b in pairwise(ordered)]
        assert table.lower.tolist() == pytest.approx([0, *middle], rel=1e-12)
        assert table.upper.tolist() == pytest.approx([*middle, 1], rel=1e-12)
    assert table.quantiles.shape == (*table.n.shape, 33)
    for block, quantiles in zip(blocks, table.quantiles[held].tolist(), strict=True):
        own = sorted(preds[block].tolist())
        assert (quantiles[0], quantiles[-1]) == (own[0], own[-1])
        assert quantiles == sorted(quantiles)
        assert set(quantiles) <= set(own)


# Gradients, by finite differences of the loops.


@setting
@pytest.mark.parametrize("name", [*BINNED, "corp-brier", "corp-nll"])
def test_slow_loop_gradient(name, task, how):
    if name.startswith("corp"):
        (function, loop), options = component("mcb", name.removeprefix("corp-")), {}
    else:
        function, options, loop = BINNED[name]
    preds, target = distinct(task)
    leaf = preds.clone().requires_grad_()
    function(leaf, target, task=task, validate_args=False, **how, **options).backward()
    step = 1e-6
    for at in [(0,), (7,), (20,)] if task == "binary" else [(0, 0), (7, 2), (20, 3)]:
        values = []
        for sign in (1, -1):
            moved = preds.clone()
            moved[at] += sign * step
            columns = looped(loop, task, how, moved, target)
            values.append(sum(columns) / len(columns))
        assert leaf.grad[at].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("score", ["brier", "nll"])
def test_slow_loop_gradient_of_corp_with_weights(score):
    function, loop = component("mcb", score)
    preds, target = distinct("binary")
    weights = torch.arange(24) % 3
    leaf = preds.clone().requires_grad_()
    function(leaf, target, task="binary", weights=weights).backward()
    for at in (0, 1, 11, 23):
        moved = [preds.index_add(0, torch.tensor([at]), torch.tensor([sign * 1e-6], dtype=F64)) for sign in (1, -1)]
        up, down = (looped(loop, "binary", {}, p, target, weights)[0] for p in moved)
        assert leaf.grad[at].item() == pytest.approx((up - down) / 2e-6, rel=1e-6, abs=1e-8)


def test_closed_form_gradient_of_ks():
    """KS is |sum (y - p)| / N up to where it is largest: -sign / N for each of those samples, 0 beyond."""
    preds = torch.tensor([0.1, 0.3, 0.6, 0.9], dtype=F64, requires_grad=True)
    tc.ks(preds, torch.tensor([1, 1, 0, 0]), task="binary").backward()  # 0.9, 1.6, 1.0, 0.1
    assert preds.grad.tolist() == [-1 / 4, -1 / 4, 0, 0]


# Closed forms.


FOUR = {"preds": torch.tensor([0.6, 0.1, 0.8, 0.2], dtype=F64), "target": torch.tensor([1, 0, 1, 1]), "task": "binary"}


def test_closed_form_equal_mass_bins():
    """Two bins of two: {0.1, 0.2} with one positive, {0.6, 0.8} with two."""
    gaps = [1 / 2 - (0.1 + 0.2) / 2, 1 - (0.6 + 0.8) / 2]
    given = {**FOUR, "n_bins": 2}
    assert tc.ace(**given).item() == pytest.approx(sum(gaps) / 2)
    assert tc.mce(**given, bins="equal_mass").item() == pytest.approx(max(gaps))
    assert tc.rmsce(**given, bins="equal_mass").item() == pytest.approx(math.sqrt((gaps[0] ** 2 + gaps[1] ** 2) / 2))


def test_closed_form_a_cut_inside_a_tie_moves_to_its_end():
    """The cut at 2 falls between the two 0.5: pooled {0.2, 0.5, 0.5} and {0.9}; split as the samples come."""
    given = {"preds": torch.tensor([0.2, 0.5, 0.5, 0.9]), "target": torch.tensor([0, 1, 0, 1]), "task": "binary"}
    pooled = (3 * abs(1 / 3 - 1.2 / 3) + abs(1 - 0.9)) / 4
    split = (2 * abs(1 / 2 - 0.7 / 2) + 2 * abs(1 / 2 - 1.4 / 2)) / 4
    assert tc.ace(**given, n_bins=2).item() == pytest.approx(pooled, abs=1e-7)
    assert tc.ace(**given, n_bins=2, ties="split").item() == pytest.approx(split, abs=1e-7)


@pytest.mark.parametrize("levels", [2, 50, 2**30])
@pytest.mark.parametrize("most_ties", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_law_equal_mass_sums_are_those_of_the_sorted_sample(dtype, most_ties, levels, monkeypatch):
    monkeypatch.setattr("torchcalib.kernels.ranking._MOST_TIES", most_ties)
    generator = torch.Generator().manual_seed(levels)
    for length in (1, 7, 300):
        score = (torch.randint(0, levels, (3, length), generator=generator).to(F64) / (levels - 1)).to(dtype)
        score = torch.where(score == 0, -score, score)  # -0 is 0
        score[1, torch.rand(length, generator=generator) < 0.3] = torch.nan
        score[2] = torch.nan
        label = torch.randint(0, 2, (3, length), generator=generator).to(torch.uint8)
        for n_bins in (1, 2, 15, 40):
            sums, ends = ranking.equal_mass_sums(score, label, n_bins)
            in_order, labels, size = ranking.sort_labelled(score, label)
            cuts = torch.arange(1, n_bins + 1) * size.unsqueeze(-1) // n_bins
            assert torch.equal(ends, ranking.end_of_ties(in_order, cuts))
            expected = [ends.diff(prepend=torch.zeros(3, 1)), *(ranking.run_sums(x, ends) for x in (in_order, labels))]
            torch.testing.assert_close(sums, torch.stack(expected, -2).to(F64), rtol=1e-14, atol=0)


def test_law_long_samples_are_cut_as_short_ones(monkeypatch):
    preds, target, _ = sample("multilabel", n=500)
    options = {"task": "multilabel", "bins": "equal_mass"}
    table, value = tc.bin_table(preds, target, **options), tc.ace(preds, target, task="multilabel", average=None)
    monkeypatch.setattr("torchcalib.binnings._LONG", 1)
    assert torch.equal(tc.ace(preds, target, task="multilabel", average=None), value)
    again = tc.bin_table(preds, target, **options)
    for column in ("lower", "upper", "n", "confidence", "frequency"):
        torch.testing.assert_close(getattr(again, column), getattr(table, column), rtol=0, atol=0, equal_nan=True)


def test_closed_form_ks_looks_at_the_end_of_a_tie_only():
    """Sums of y - p: -0.1; then the tie, 0.6 - 0.4, to 0.1; then 0.3. Inside the tie it would be 0.5 or -0.5."""
    preds, target = torch.tensor([0.1, 0.4, 0.4, 0.8], dtype=F64), torch.tensor([0, 1, 0, 1])
    assert tc.ks(preds, target, task="binary").item() == pytest.approx(0.3 / 4)


@pytest.mark.parametrize(("score", "of"), [("brier", lambda q: (1 - q) ** 2), ("nll", lambda q: -math.log(q))])
def test_closed_form_corp(score, of):
    """In the right order the fit is perfect; in the wrong one it is the base rate, and knows nothing."""
    preds = torch.tensor([0.25, 0.75], dtype=F64)
    right = tc.corp(preds, torch.tensor([0, 1]), task="binary", score=score)
    assert [part.item() for part in right] == pytest.approx([of(0.75), of(0.75), of(0.5), of(0.5)])
    wrong = tc.corp(preds, torch.tensor([1, 0]), task="binary", score=score)
    assert [part.item() for part in wrong] == pytest.approx([of(0.25), of(0.25) - of(0.5), 0, of(0.5)])
    assert right._fields == ("score", "mcb", "dsc", "unc")


def test_closed_form_corp_of_an_infinite_score():
    """A certain prediction that is wrong: infinite score and miscalibration; the other two parts stay finite."""
    d = tc.corp(torch.tensor([0.0, 0.5]), torch.tensor([1, 0]), task="binary", score="nll")
    assert [part.item() for part in d] == pytest.approx([math.inf, math.inf, 0, math.log(2)])


def test_closed_form_rejections_are_not_an_interval():
    """1 of 30: the p-value is 0.0491 at p = 0.170 and 0.0507 at p = 0.177, farther out than what is rejected."""
    preds = torch.tensor([0.170] * 10 + [0.177] * 20, dtype=F64)
    target = torch.tensor([1] + [0] * 29)
    given = {"preds": preds, "target": target, "task": "binary", "bins": [0, 1]}
    assert tc.tce(**given).item() == pytest.approx(100 * 10 / 30)
    assert tc.tce_table(**given).rejected.tolist() == [10]


def test_closed_form_tce_norms():
    """0 of 20: 0.95^20 = 0.36 keeps p = 0.05, 0.6^20 rejects 0.4. 10 of 10: 0.9 is kept, 0.6 is not (0.008)."""
    preds = torch.tensor([0.05] * 15 + [0.4] * 5 + [0.6] * 4 + [0.9] * 6, dtype=F64)
    target = torch.tensor([0] * 20 + [1] * 10)
    given = {"preds": preds, "target": target, "task": "binary", "bins": [0, 0.5, 1]}
    left, right = 5 / 20, 4 / 10
    assert tc.tce(**given).item() == pytest.approx(100 * (20 * left + 10 * right) / 30)
    assert tc.tce(**given, norm="l2").item() == pytest.approx(100 * math.sqrt((20 * left**2 + 10 * right**2) / 30))
    assert tc.tce(**given, norm="max").item() == pytest.approx(100 * right)


@pytest.mark.parametrize(("p", "positives", "value"), [(0.5, 10, 0), (0.5, 0, 100), (1.0, 19, 100), (0.0, 0, 0)])
def test_closed_form_tce_of_a_constant_prediction(p, positives, value):
    target = (torch.arange(20) < positives).long()
    assert tc.tce(torch.full((20,), p), target, task="binary").item() == value


def test_closed_form_one_positive_class_is_its_column_and_the_rest_its_complement():
    preds, target, _ = sample("multiclass")
    for k in range(N_CLASSES):
        column, label = preds[:, k], (target == k).long()
        others = [j for j in range(N_CLASSES) if j != k]
        for function in (tc.ace, tc.ks, tc.tce):
            one = function(preds, target, task="multiclass", positive_classes=[k])
            assert one == function(column, label, task="binary")
        rest = tc.ks(preds, target, task="multiclass", positive_classes=others)
        assert rest == tc.ks(1 - column, 1 - label, task="binary")


def test_closed_form_tce_of_classes_is_the_mean_of_one_against_the_rest():
    """[TCE] Remark 2, and the default of a multi-class task."""
    preds, target, _ = sample("multiclass")
    each = [tc.tce(preds[:, k], (target == k).long(), task="binary").item() for k in range(N_CLASSES)]
    assert tc.tce(preds, target, task="multiclass").item() == pytest.approx(sum(each) / N_CLASSES)
    assert tc.tce(preds, target, task="multiclass", average=None).tolist() == each


def test_closed_form_gce_instances():
    """[TCE] Definition 1: ECE, MCE, RMSCE and ACE are choices of loss, bins and norm."""
    preds, target, weights = sample("binary", weighted=True)
    given = {"preds": preds, "target": target, "task": "binary", "weights": weights, "n_bins": 7}

    def gap(b):
        return b.gap.abs()

    for norm, function in (("l1", tc.ece), ("l2", tc.rmsce), ("max", tc.mce)):
        torch.testing.assert_close(tc.gce(**given, loss=gap, norm=norm), function(**given))
    torch.testing.assert_close(tc.gce(**given, loss=gap, bins="equal_mass"), tc.ace(**given))


def test_closed_form_a_class_without_samples():
    """Class 3 is never true: no positives anywhere, frequency 0 in every bin; nothing to know, so UNC = DSC = 0."""
    preds, target, _ = sample("multiclass")
    target = target % (N_CLASSES - 1)
    column = preds[:, -1]
    given = {"task": "multiclass", "reduction": "classwise", "average": None}
    assert tc.ace(preds, target, **given)[-1].item() == pytest.approx(column.mean().item())
    assert tc.ks(preds, target, **given)[-1].item() == pytest.approx(column.mean().item())
    parts = [part[-1].item() for part in tc.corp(preds, target, **given)]
    assert parts == pytest.approx([column.square().mean().item(), column.square().mean().item(), 0, 0])
    expected = looped(lambda *columns: oracle.tce("pava_bc", *columns), "multiclass", given, preds, target)
    assert tc.tce(preds, target, **given).tolist() == pytest.approx(expected)


READINGS = {
    "ace": tc.ace,
    "mce": lambda *a, **k: tc.mce(*a, bins="equal_mass", **k),
    "rmsce": lambda *a, **k: tc.rmsce(*a, bins="equal_mass", **k),
    "tce": tc.tce,
    "tce-paper": lambda *a, **k: tc.tce(*a, variant="paper", **k),
    "tce-pava": lambda *a, **k: tc.tce(*a, bins="pava", **k),
    "tceq": lambda *a, **k: tc.tce(*a, bins="equal_mass", **k),
    "gce": lambda *a, **k: tc.gce(*a, bins="pava", loss=lambda b: b.gap.abs(), **k),
    "ks": tc.ks,
    "corp": lambda *a, **k: torch.stack(tc.corp(*a, **k), -1),
}
reading = pytest.mark.parametrize("name", READINGS)


@reading
def test_no_data_is_nan_of_the_usual_shape(name):
    function, last = READINGS[name], (4,) if name == "corp" else ()
    empty = function(torch.empty(0), torch.empty(0, dtype=torch.int64), task="binary")
    assert (empty.shape, empty.dtype) == (last, torch.float32)
    assert empty.isnan().all()
    target = torch.ones(3, 5, dtype=torch.int64)
    batch = function(torch.rand(3, 5, dtype=F64), target, task="binary", weights=torch.zeros(3, 5))
    assert (batch.shape, batch.dtype) == ((3, *last), F64)
    assert batch.isnan().all()


# Laws.


@st.composite
def samples(draw, max_weight=3):
    """Scores in steps of 1/16, labels and weights that are not all 0."""
    n = draw(st.integers(2, 30))
    scores = draw(st.lists(st.integers(0, 16), min_size=n, max_size=n))
    outcomes = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    weights = draw(st.lists(st.integers(0, max_weight), min_size=n, max_size=n).filter(lambda w: sum(w) > 1))
    return torch.tensor(scores, dtype=F64) / 16, torch.tensor(outcomes), torch.tensor(weights)


@reading
@given(samples(), st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_law_sample_order(name, data, random):
    order = list(range(len(data[0])))
    random.shuffle(order)
    values = [READINGS[name](p, y, task="binary", weights=w) for p, y, w in (data, [column[order] for column in data])]
    torch.testing.assert_close(*values, rtol=1e-13, atol=1e-14)


@reading
@given(samples())
@settings(max_examples=20)
def test_law_whole_weights_are_copies(name, data):
    preds, target, weights = data
    copies = [column.repeat_interleave(weights) for column in (preds, target)]
    for given_weights in (weights, weights.double()):
        weighted = READINGS[name](preds, target, task="binary", weights=given_weights)
        torch.testing.assert_close(weighted, READINGS[name](*copies, task="binary"), rtol=1e-13, atol=1e-14)


@reading
@setting
def test_law_batch_axis_is_a_loop(name, task, how):
    sets = [sample(task, seed=seed, weighted=True) for seed in range(3)]
    batch = READINGS[name](
        torch.stack([s[0] for s in sets]), torch.stack([s[1] for s in sets]), task=task,
        weights=torch.stack([s[2] for s in sets]), **how,
    )  # fmt: skip
    loop = [READINGS[name](preds, target, task=task, weights=weights, **how) for preds, target, weights in sets]
    torch.testing.assert_close(batch, torch.stack(loop), rtol=1e-13, atol=1e-14)


@given(samples(), st.integers(1, 20))
def test_law_bounds_of_binned_errors(data, n_bins):
    """|ESCE| <= ACE <= RMSCE <= MCE <= 1; of one bin ACE is |ESCE|."""
    preds, target, weights = data
    given = {"task": "binary", "weights": weights}
    esce, one = tc.esce(preds, target, **given).abs().item(), tc.ace(preds, target, n_bins=1, **given).item()
    ace = tc.ace(preds, target, n_bins=n_bins, **given).item()
    rmsce = tc.rmsce(preds, target, bins="equal_mass", n_bins=n_bins, **given).item()
    mce = tc.mce(preds, target, bins="equal_mass", n_bins=n_bins, **given).item()
    assert one == pytest.approx(esce, abs=1e-12)
    for less, more in pairwise([esce, ace, rmsce, mce, 1]):
        assert less <= more + 1e-12


@given(samples())
def test_law_bounds_of_ks(data):
    """|ESCE| is its last sum. No bin between two of its sums has share |gap| above 2 KS."""
    preds, target, weights = data
    given = {"preds": preds, "target": target, "task": "binary", "weights": weights}
    ks = tc.ks(**given).item()
    assert tc.esce(**given).abs().item() <= ks + 1e-12
    assert ks <= (weights * (target - preds).abs()).sum().item() / weights.sum().item() + 1e-12
    largest = tc.gce(**given, bins="pava", loss=lambda b: b.share * b.gap.abs(), norm="max").item()
    assert largest <= 2 * ks + 1e-12


@given(samples())
def test_law_parts_of_corp(data):
    """Score = MCB - DSC + UNC, no part negative; a second fit finds nothing to mend."""
    preds, target, weights = data
    given = {"task": "binary", "weights": weights}
    for score in ("brier", "nll"):
        d = tc.corp(preds * 0.875 + 0.0625, target, score=score, **given)
        torch.testing.assert_close(d.score, d.mcb - d.dsc + d.unc)
        assert min(d.mcb, d.dsc, d.unc) >= -1e-12


@pytest.mark.parametrize("score", ["brier", "nll"])
@given(data=samples())
@settings(max_examples=40)
def test_law_corp_is_the_fit_of_scikit_learn(score, data):
    isotonic = pytest.importorskip("sklearn.isotonic")
    preds, target, weights = data
    kept = weights > 0
    x, y, w = (column[kept].double().numpy() for column in data)
    fitted = isotonic.IsotonicRegression(y_min=0, y_max=1).fit(x, y, sample_weight=w).predict(x)
    function = {"brier": tc.brier_score, "nll": tc.nll}[score]
    best = function(torch.from_numpy(fitted).clamp(0, 1), target[kept], task="binary", weights=weights[kept])
    d = tc.corp(preds, target, task="binary", weights=weights, score=score)
    assert (d.unc - d.dsc).item() == pytest.approx(best.item(), abs=1e-9)


@given(samples(), st.sampled_from(KINDS))
@settings(max_examples=20)
def test_law_tce_grows_with_alpha(data, bins):
    preds, target, weights = data
    given = {"preds": preds, "target": target, "task": "binary", "bins": bins, "weights": weights}
    values = [tc.tce(**given, alpha=alpha).item() for alpha in (0.001, 0.05, 0.3, 0.999)]
    assert values == sorted(values)
    assert values[0] >= 0
    assert values[-1] <= 100 + 1e-9


@pytest.mark.parametrize("variant", ["code", "paper"])
@given(st.integers(0, 10**6), st.integers(3, 80), st.data())
@settings(max_examples=40)
def test_law_size_of_blocks(variant, seed, n, data):
    """Distinct scores: all but the last two blocks hold n_min or more; none passes n_max but as `pava_bc` says."""
    n_min = data.draw(st.integers(1, n - 1))
    n_max = data.draw(st.integers(n_min, n))
    generator = torch.Generator().manual_seed(seed)
    preds, target = torch.randperm(n, generator=generator) / n, torch.randint(0, 2, (n,), generator=generator)
    sizes = tc.tce_table(preds, target, task="binary", n_min=n_min, n_max=n_max, variant=variant).n.tolist()
    assert sum(sizes) == n
    assert all(size >= n_min for size in [*sizes[:-2], sizes[-1]])
    if variant == "code":
        assert all(size <= n_max for size in sizes[:-1])
        assert sizes[-1] <= n_max + n_min


@reading
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_law_narrow_predictions_are_read_as_they_are(name, dtype):
    preds, target, _ = sample("binary")
    value = READINGS[name](preds.to(dtype), target, task="binary")
    assert value.dtype == torch.float32
    exact = READINGS[name](preds.to(dtype).double(), target, task="binary")
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-6)


@reading
def test_law_samples_of_weight_zero_are_not_read(name):
    preds, target, _ = sample("binary")
    weights = (torch.arange(60) % 3 > 0).long()
    kept = weights > 0
    hidden = preds.masked_fill(~kept, math.nan)
    value = READINGS[name](hidden, target.masked_fill(~kept, 7), task="binary", weights=weights)
    assert torch.equal(value, READINGS[name](preds[kept], target[kept], task="binary"))
    ignored = READINGS[name](preds, target.masked_fill(~kept, -1), task="binary", ignore_index=-1)
    assert torch.equal(value, ignored)


@reading
def test_law_logits_are_their_probabilities(name):
    logits, target = torch.randn(60, generator=torch.Generator().manual_seed(0), dtype=F64), sample("binary")[1]
    value = READINGS[name](logits, target, task="binary", from_logits=True)
    torch.testing.assert_close(value, READINGS[name](logits.sigmoid(), target, task="binary"))


@pytest.mark.parametrize("copies", [10**8, 10**10, 10**13])
def test_law_that_counts_larger_than_products_of_them_can_be_give_the_value_of_one_copy_each(copies):
    preds, target, _ = sample("binary")
    weights = torch.full_like(target, copies)
    for bins in ("pava", "pava_bc"):
        options = {"task": "binary", "bins": bins, "loss": lambda b: b.gap.abs()}
        torch.testing.assert_close(tc.gce(preds, target, weights=weights, **options), tc.gce(preds, target, **options))
    many, one = (torch.stack(tc.corp(preds, target, task="binary", weights=w)) for w in (weights, None))
    torch.testing.assert_close(many, one)
    options = {"task": "binary", "n_bins": 2**20}
    torch.testing.assert_close(tc.ace(preds, target, weights=weights, **options), tc.ace(preds, target, **options))


@pytest.mark.parametrize("bins", KINDS, ids=str)
def test_law_that_no_series_have_no_values(bins):
    preds, target = torch.zeros(2, 0, 5), torch.zeros(2, 0, 5).long()
    assert tc.tce(preds, target, task="binary", bins=bins).shape == (2, 0)
    assert tc.tce_table(preds, target, task="binary", bins=bins).n.shape[:-1] == (2, 0)
    assert tc.corp(preds, target, task="binary").mcb.shape == (2, 0)
    assert tc.mce(torch.zeros(4, 0), torch.zeros(4, 0).long(), task="multilabel", bins=bins).isnan()


DIFFERENTIABLE = {
    "ace": lambda p, y: tc.ace(p, y, task="binary"),
    "ks": lambda p, y: tc.ks(p, y, task="binary"),
    "corp": lambda p, y: tc.corp(p, y, task="binary").mcb,
    "rmsce": lambda p, y: tc.rmsce(p, y, task="binary", bins="equal_mass", n_bins=4),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, on the way to its forward mode
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_law_that_every_way_to_differentiate_agrees_with_backward(name):
    preds, target, _ = sample("binary", n=12)
    preds = preds.clamp(0.01, 0.99) + torch.arange(12) * 1e-4  # no ties: the gradient is one

    def value(p):
        return DIFFERENTIABLE[name](p, target)

    leaf = preds.clone().requires_grad_()
    value(leaf).backward()
    torch.testing.assert_close(torch.func.grad(value)(preds), leaf.grad)
    torch.testing.assert_close(torch.func.jacfwd(value)(preds), leaf.grad)
    batch, mapped = torch.stack((preds, preds)), torch.func.vmap(value)
    torch.testing.assert_close(torch.func.grad(lambda p: mapped(p).sum())(batch)[1], leaf.grad)
    leaves = batch.clone().requires_grad_()
    mapped(leaves).sum().backward()
    torch.testing.assert_close(leaves.grad[1], leaf.grad)
    ones = torch.ones_like(batch)
    torch.testing.assert_close(torch.func.jvp(mapped, (batch,), (ones,))[1][0], leaf.grad.sum())

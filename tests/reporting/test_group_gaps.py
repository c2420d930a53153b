"""Groups in reports: errors and names, levels, gaps in probability, and differences between groups in a verdict."""

import json
import math

import pytest
import torch
from helpers.reports import MODES, QUICK, TASKS, bare, predictions
from scipy.stats import binom, norm

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.inputs import InputFormat
from torchcalib.display.words import p_words, significant
from torchcalib.inference.roots import signed_roots
from torchcalib.reporting.groups import GroupGaps
from torchcalib.reporting.render import terminal
from torchcalib.reporting.render.contents import key_numbers
from torchcalib.reporting.render.html import render

F64 = torch.float64


def exact_tail(bins, observed, low):
    """Return P(S <= observed), or P(S >= observed), of a sum S over bins (weight, trials, probability)."""
    law = {0.0: 1.0}
    for x, n, p in bins:
        pmf = binom.pmf(range(n + 1), n, p)
        further = {}
        for s, mass in law.items():
            for k in range(n + 1):
                at = round(s + x * (k - n * p), 9)
                further[at] = further.get(at, 0.0) + mass * pmf[k]
        law = further
    return sum(mass for s, mass in law.items() if (s <= observed + 1e-8 if low else s >= observed - 1e-8))


SUMS = {  # bins (weight, trials, probability), and counts of each bin
    "count, low": ([(1, 40, 0.1)], [0]),
    "count, high": ([(1, 40, 0.1)], [11]),
    "nearly certain": ([(1, 60, 0.95)], [50]),
    "gap of three bins": ([(1, 20, 0.02), (1, 15, 0.3), (1, 25, 0.9)], [3, 9, 24]),
    "slope, one wrong": ([(-4.6, 50, 0.01), (-0.8, 12, 0.3), (4.6, 40, 0.99)], [1, 3, 38]),
    "slope, all right": ([(-2.2, 30, 0.1), (2.2, 30, 0.9)], [0, 30]),
    "slope, all wrong": ([(-3.0, 9, 0.05), (0.4, 9, 0.6), (3.0, 9, 0.95)], [3, 5, 6]),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("unit", [1.0, 0.01])
def test_roots_have_the_tail_probabilities_of_an_enumeration(name, unit):
    """Within 25%: a normal tail is wrong by factors of 3 to 1,000 for the slopes. Units of weights change nothing."""
    bins, counts = SUMS[name]
    x, n, p = (torch.tensor(column, dtype=F64) for column in zip(*bins, strict=True))
    deviation = torch.tensor(counts, dtype=F64) - n * p
    observed = float((x * deviation).sum())
    given = unit * deviation, p, unit**2 * n * p * (1 - p), torch.full_like(p, unit)
    root = float(signed_roots(x, *given))
    expected = exact_tail(bins, observed, low=observed < 0)
    assert norm.sf(abs(root)) == pytest.approx(expected, rel=0.25)
    assert math.copysign(1, root) == math.copysign(1, observed)


def calibrated(n, n_groups, seed=0):
    """Return log-odds, outcomes of these probabilities, and groups by chance."""
    g = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, generator=g, dtype=F64)
    return z, torch.bernoulli(z.sigmoid(), generator=g).long(), torch.randint(n_groups, (n,), generator=g)


@pytest.mark.parametrize("law", ["beta(.2, .2)", "beta(.5, 4)", "logit SD 4"])
def test_alarms_of_40_groups_with_extreme_probabilities_hold_their_level(law):
    """At 2.5%, statistics in standard errors have 9% of alarms; 10 of 200 is two and a half standard errors more."""
    from benchmarks.groups import cell

    found = cell(law, 2_000, 40, 200)
    assert int((found["gaps"] < 0.025).sum()) <= 10
    assert int((found["differences"] < 0.05).sum()) <= 20
    assert int((found["normal"] < 0.025).sum()) > 10


def test_alarms_of_40_labels_of_rare_events_hold_their_level():
    """At 5%, the score statistic of gap and slope together has alarms in 18 of these 100 data sets."""
    g = torch.Generator().manual_seed(0)
    p = (torch.randn(100, 500, 40, generator=g, dtype=F64) - 4.6).sigmoid()
    y = torch.bernoulli(p, generator=g).long()
    bins = EqualWidthBins("classwise", 15, right=False, with_noise=True)
    read = InputFormat("multilabel", num_classes=40).read
    sets = (bins.from_predictions(read(*each, None, batch_shape=())) for each in zip(p, y, strict=True))
    alarms = [GroupGaps.from_bins(range(40), each, 1.0).worst_label.p_value < 0.05 for each in sets]
    assert sum(alarms) <= 9  # two standard errors more


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda z: z + 1.2, "The probability is too high in group 3: mean P(y = 1) is "),
        (lambda z: 2.5 * z, "Probabilities are too close to 0 and 1 in group 3: the mean probability of the more "),
    ],
)
def test_verdict_on_a_group_has_its_own_gap_interval_and_degree(change, words):
    z, y, group = calibrated(4_000, 10)
    p = torch.where(group == 3, change(z), z).sigmoid()
    report = tc.report(p, y, groups=group, with_intervals=False)
    decision, rows = report.decision, group == 3
    assert decision.kind == "bad group"
    assert words in decision.cause
    side = (p[rows] < 0.5) & ("of the more" in words)
    mean = float(torch.where(side, 1 - p[rows], p[rows]).mean())
    frequency = float(torch.where(side, 1 - y[rows], y[rows]).double().mean())
    # The bin of 0.5 has one side in sums, and two in rows.
    numbers = [float(word.strip("%,.")) for word in decision.cause.split() if word[0].isdigit() and "%" in word]
    assert numbers[:2] == pytest.approx([100 * mean, 100 * frequency], abs=0.06 if not side.any() else 1.5)
    low, high = (float(x.strip(",)")) for x in decision.cause.replace("−", "-").split("95% interval ")[1].split()[:3:2])
    assert low < 100 * (frequency - mean) < high < 0
    alone = tc.report(p[rows], y[rows], task="binary", **QUICK)
    assert decision.size.startswith(f"RMSCE of the group, debiased: {significant(alone['rmsce_debiased'])}")
    assert report["rmsce_debiased"] < 0.5 * alone["rmsce_debiased"], "not of all rows"
    is_certain = "(95% interval 0 to" not in decision.size
    assert decision.degree in (("clearly", "badly") if is_certain else ("",))
    assert "Use the predictions as they are" not in decision.action
    assert "calibrate it separately" in decision.action


def test_interval_of_a_group_is_adjusted_for_the_choice_and_contains_the_clusters():
    """One of 10 groups has the level 1 - 0.05 / 10 (Benjamini, Yekutieli 2005). Clusters widen the interval."""
    z, y, group = calibrated(4_000, 10)
    p = z.sigmoid()
    alone = tc.ESCE(task="binary")
    alone.update(p[group == 3], y[group == 3])
    expected = alone.test(level=0.995)
    builder = tc.ReportBuilder(task="binary", **QUICK)
    builder.update(p, y, groups=group)
    bins = builder._states["groups"].names, builder._statistic("groups")
    gaps = GroupGaps.from_bins(*bins)
    _, _, (low, high) = gaps.gap_of(gaps.names.index("3"))
    assert (low, high) == pytest.approx((float(expected.low), float(expected.high)), abs=1e-9)
    wide = GroupGaps.from_bins(*bins, effect=4.0)
    _, _, ends = wide.gap_of(wide.names.index("3"))
    assert ends[1] - ends[0] == pytest.approx(2 * (high - low), rel=0.1)
    assert wide.roots.abs().sum() < 0.6 * gaps.roots.abs().sum()


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_roots_do_not_depend_on_the_unit_of_weights(scale):
    z, y, group = calibrated(500, 5)
    weights = torch.rand(500, generator=torch.Generator().manual_seed(1), dtype=F64)
    roots = []
    for factor in (1.0, scale):
        builder = tc.ReportBuilder(task="binary", **QUICK)
        builder.update(z.sigmoid(), y, weights=factor * weights, groups=group)
        roots.append(GroupGaps.from_bins(builder._states["groups"].names, builder._statistic("groups")).roots)
    assert len(roots[0]) == 5
    torch.testing.assert_close(roots[1], roots[0])


def shown(report, capsys):
    terminal.show(report)
    return [*capsys.readouterr().out.split("\n\n"), render(bare(report)), str(report)]


def test_first_screen_names_a_group_only_if_groups_differ(capsys):
    """Random groups of an over-confident model have no worst one, everywhere; a bad group is named, shrunk."""
    z, y, group = calibrated(2_000, 4)
    names = list("abcd")
    over = tc.report((3 * z).sigmoid(), y, groups=group, group_names=names, with_intervals=False)
    number = key_numbers(over)[-1]
    p_value = over.groups.difference_p_value
    assert p_value > 0.05
    assert number == ("Groups", f"no significant difference (p {p_words(p_value, equals='= ')})", "between 4 groups")
    assert over.decision.kind == "over-confidence"
    assert over.groups.worst is None
    assert json.loads(over.to_json())["groups"]["worst"] is None
    assert over.flat()["groups/difference/p_value"] == p_value
    for text in (" ".join(shown(over, capsys)), over.groups.to_markdown()):
        assert "Worst group" not in text
    assert all("no significant difference" in text for text in (render(bare(over)), str(over)))
    bad = tc.report((z + 2 * (group == 2)).sigmoid(), y, groups=group, group_names=names, **QUICK)
    number = key_numbers(bad)[-1]
    assert number[:2] == ("Worst group", "c")
    shrunk = bad.groups.shrunk[bad.groups.group.index("c")]
    assert number.detail == f"shrunk ECE {shrunk:.3f}, significant differences (p < 0.001)"
    assert json.loads(bad.to_json())["groups"]["worst"] == bad.groups.worst == "c"
    few = tc.report(z[:8].sigmoid(), y[:8], groups=group[:8], **QUICK)
    assert key_numbers(few)[-1].value == "too few outcomes to compare groups"


def test_a_fault_of_all_groups_is_not_blamed_on_one_without_the_predictions():
    z, y, group = calibrated(4_000, 10)
    assert tc.report((2 * z).sigmoid(), y, groups=group, **QUICK).decision.kind != "bad group"
    one = torch.where(group == 3, 3 * z, z)
    assert tc.report(one.sigmoid(), y, groups=group, **QUICK).decision.kind == "bad group"


# Errors and names of groups

NAMES = [f"site {letter}" for letter in "abcdefgh"]


def with_a_bad_site(n=1_600):
    """Return calibrated predictions except at one site, outcomes and sites; another site is empty."""
    g = torch.Generator().manual_seed(0)
    groups = (torch.rand(n, generator=g) ** 2 * 8).long()
    groups[groups == 6] = 0
    p = torch.rand(n, generator=g, dtype=torch.float64) * 0.6
    return p, (torch.rand(n, generator=g) < p + 0.3 * (groups == 3)).long(), groups


@pytest.mark.parametrize("task", TASKS)
def test_groups_have_the_weighted_error_of_the_main_mode(task):
    logits, target = predictions(task)
    weights, groups = torch.arange(200) % 3, torch.arange(200) % 4
    groups[9], groups[12] = -1, -77  # rows of weight 0, whose groups are not checked
    logits[20] = torch.nan
    options = {"task": task, "from_logits": True, "nan_policy": "drop"}
    report = tc.report(logits, target, weights=weights, groups=groups, **QUICK, **options)
    found = {row["group"]: row for row in report.groups.rows()}
    assert set(found) == {"0", "1", "2", "3"}
    for k in range(4):
        rows = groups == k
        value = F.ece(logits[rows], target[rows], weights=weights[rows], mode=MODES[task][0], **options)
        assert found[str(k)]["value"] == pytest.approx(float(value))


def test_the_worst_group_is_first():
    p, y, groups = with_a_bad_site()
    report = tc.report(p, y, groups=groups, group_names=NAMES, task="binary", **QUICK)
    table = report.groups
    assert (table.n_groups, table.group[0], table.p_value[0] < 0.01) == (7, "site d", True)


def test_long_similar_names_are_shown_with_their_differences(capsys):
    pytest.importorskip("rich")
    p, y, groups = with_a_bad_site(400)
    alike = ["a" * 500 + letter + "z" * 499 for letter in "bc"]
    report = tc.report(p, y, groups=groups, group_names=[*alike, "m" * 1000, *NAMES[3:]], task="binary", **QUICK)
    terminal.show(report, everything=True)
    column = "".join("".join(line[:25].split()) for line in capsys.readouterr().out.splitlines())
    for text in (str(report), column, render(bare(report))):
        assert all(name in text for name in alike), "the differences of the names are not omitted"
        assert "m" * 900 not in text

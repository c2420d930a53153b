"""Slices: every intersection equals a loop over its rows, and p-values equal a loop over simulated outcomes."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from helpers.reports import QUICK

import torchcalib as tc
from torchcalib.core.groups import levels_of
from torchcalib.inference.clusters import random_signs
from torchcalib.inference.simulation import Simulation
from torchcalib.reporting.slices import Intersections, without_skewness

N = 3_000
G = torch.Generator().manual_seed(0)
P = torch.rand(N, generator=G, dtype=torch.float64)
Y = torch.bernoulli(P, generator=G)
AGE, SEX = np.array(["old", "young", "", "mid"])[torch.randint(0, 4, (N,), generator=G)], torch.arange(N) % 2
X = torch.randn(N, generator=G)
WRONG = torch.where(torch.from_numpy(AGE == "old") & (SEX == 1), P.sqrt(), P)
COLUMNS = {"age": AGE, "sex": SEX, "x": X}
FEW = {"n_replicates": 99, "seed": 3}


def masks(columns, depth):
    """Return the rows of each slice, by a loop over values; ranges of numbers have equal numbers of rows."""
    values = {}
    for name, column in columns.items():
        levels, texts = levels_of({name: column}, (N,), torch.device("cpu"), n_ranges=4)[name]
        values[name] = {f"{name}={text}": (levels == k) for k, text in enumerate(texts)}
    found = {}
    for size in range(1, depth + 1):
        for chosen in itertools.combinations(columns, size):
            for parts in itertools.product(*(values[name].items() for name in chosen)):
                found[", ".join(name for name, _ in parts)] = torch.stack([rows for _, rows in parts]).all(0)
    return found


@pytest.mark.parametrize(
    ("depth", "weighted", "preds"),
    [(1, True, WRONG), (2, False, WRONG), (3, True, WRONG), (2, True, (10 * WRONG).round() / 10)],
    ids=["1", "2", "3", "ties"],
)
def test_every_slice_has_the_errors_of_its_rows(depth, weighted, preds):
    weights = torch.arange(N) % 3 if weighted else torch.ones(N, dtype=torch.int64)
    table = tc.slices(preds, Y, COLUMNS, depth=depth, weights=weights if weighted else None, cumulative=True, **FEW)
    rows_of = masks(COLUMNS, depth)
    sizes = {name: int(weights[rows].sum()) for name, rows in rows_of.items()}
    assert set(table.slice) == {name for name, n in sizes.items() if n >= 50}
    assert table.n_small == sum(0 < n < 50 for n in sizes.values())
    how = {"task": "binary"}
    worst = 0.0
    for row in (*table.rows(), {"slice": None}):
        rows = rows_of.get(row["slice"], torch.ones(N, dtype=torch.bool))
        w, p, y = weights[rows].double(), preds[rows], Y[rows]
        spread = float((w * p * (1 - p)).sum().sqrt() / w.sum())
        ecce = float(tc.ks(p, y, norm="range", weights=weights[rows], **how))
        worst = max(worst, ecce / spread)
        if row["slice"] is not None:
            expected = {
                "n": float(w.sum()),
                "gap": float(tc.esce(p, y, weights=weights[rows], **how)),
                "ece": float(tc.ece(p, y, weights=weights[rows], **how)),
                "ecce": ecce,
                "spread": spread,
            }
            assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert table.multicalibration_error == pytest.approx(worst * spread)


@pytest.mark.parametrize(
    ("seed", "expected", "weighted"),
    [  # values of MCGrad 0.1.5: MulticalibrationError(..., precision_dtype="float64", max_depth=3).mce
        (0, 0.02404936525943825, False),
        (1, 0.027404985689679216, False),
        (2, 0.027495743024679525, False),
        (0, 0.027596197066715285, True),
        (1, 0.038429321665120274, True),
        (2, 0.03624007409876553, True),
    ],
)
def test_the_multicalibration_error_is_that_of_mcgrad(seed, expected, weighted):
    generator = np.random.default_rng(seed)
    columns = {name: generator.integers(0, k, 2000) for name, k in (("a", 3), ("b", 3), ("c", 2))}
    p = generator.random(2000)
    y = (generator.random(2000) < p).astype(int)
    weights = generator.exponential(size=2000) if weighted else None
    how = {"weights": weights, "min_size": 0, "n_replicates": 1, "cumulative": True}
    found = tc.slices(p, y, columns, **how)
    assert found.multicalibration_error == pytest.approx(expected, rel=1e-9)
    logits = tc.slices(np.log(p / (1 - p)), y, columns, from_logits=True, **how)
    assert logits.multicalibration_error == pytest.approx(expected, rel=1e-9)


def test_adjusted_p_values_equal_a_loop_over_simulated_outcomes(monkeypatch):
    """Step-down max-T, Westfall and Young 1993, algorithm 2.8, with the same simulated outcomes."""
    seen = {}

    class Recorded(Simulation):
        def statistics(self):
            seen["cells"] = self.cells
            pieces = list(super().statistics())
            seen["gaps"] = torch.cat([piece.gap for piece in pieces])
            yield from pieces

    def recorded(parts, sizes, *how, of=Intersections.of):
        seen["parts"] = parts
        return of(parts, sizes, *how)

    monkeypatch.setattr("torchcalib.reporting.slices.Simulation", Recorded)
    monkeypatch.setattr(Intersections, "of", recorded)
    table = tc.slices(WRONG, Y, {"age": AGE, "sex": SEX}, **FEW)
    cells, gaps, parts = seen["cells"], seen["gaps"], seen["parts"]
    x = cells.confidence.clamp(1e-4, 1 - 1e-4).logit()

    def statistic(name, deviations):
        own = torch.tensor([set(name.split(", ")) <= set(part) for part in parts])
        found = []
        for weight in (torch.ones_like(x), x):
            w, v, p = weight[own], cells.noise[own], cells.confidence[own]
            variance, third = (w**2 * v).sum(), (w**3 * v * (1 - 2 * p)).sum()
            z = (w * deviations[own]).sum() / variance.sqrt()
            found.append(abs(float(without_skewness(z, third / variance**1.5))))
        return max(found)

    names = table.slice
    observed = {name: statistic(name, cells.outcomes - cells.expected) for name in names}
    assert table.statistic == pytest.approx([observed[name] for name in names])
    assert sorted(observed.values(), reverse=True) == pytest.approx(list(table.statistic))
    simulated = [{name: statistic(name, gap * cells.n) for name in names} for gap in gaps]
    expected, before = [], 0.0
    for k, name in enumerate(names):
        n_larger = sum(max(one[other] for other in names[k:]) >= observed[name] for one in simulated)
        before = max(before, (1 + n_larger) / (1 + len(simulated)))
        expected.append(before)
    assert table.p_value == pytest.approx(expected)
    largest = torch.tensor([max(one.values()) for one in simulated], dtype=torch.float64)
    assert table.critical_value == pytest.approx(float(largest.quantile(0.95)))


def test_statistics_of_clusters_equal_a_loop_over_their_rows():
    """p-values are at least those of random signs (step-down max-T) of the sums of clusters."""
    clusters, columns = torch.arange(N) // 5, {"age": AGE, "sex": SEX}
    found = tc.slices(WRONG, Y, columns, clusters=clusters, **FEW)
    apart = tc.slices(WRONG, Y, columns, **FEW)
    rows_of = {name: rows.double() for name, rows in masks(columns, 2).items()}
    # Log-odds of the mean confidence of each bin in each combination of values
    place = torch.from_numpy(np.unique(AGE, return_inverse=True)[1]) * 40 + SEX * 20 + (WRONG * 15).long().clamp(max=14)
    x = (torch.bincount(place, WRONG) / torch.bincount(place))[place].clamp(1e-4, 1 - 1e-4).logit()
    squares, of_rows, sums, skewness = {}, {}, {}, {}
    for name in apart.slice:
        per_row = rows_of[name] * torch.stack((Y - WRONG, x * (Y - WRONG)))
        sums[name] = torch.zeros(2, N // 5, dtype=torch.float64).index_add(1, clusters, per_row)
        weight = rows_of[name] * torch.stack((torch.ones_like(x), x))
        of_rows[name] = (weight**2 * WRONG * (1 - WRONG)).sum(1)
        squares[name] = (sums[name] ** 2).sum(1)
        skewness[name] = (weight**3 * WRONG * (1 - WRONG) * (1 - 2 * WRONG)).sum(1) / of_rows[name] ** 1.5
    residuals, effects, observed = [], {}, {}
    for name in apart.slice:
        same = [other for other in apart.slice if columns_in(other) == columns_in(name)]
        common = sum(squares[other] for other in same) / sum(of_rows[other] for other in same)
        variance = squares[name].maximum(of_rows[name] * common.clamp(min=1))
        effects[name] = variance / of_rows[name]
        residuals.append(sums[name] / variance.sqrt().unsqueeze(1))
        z = without_skewness(residuals[-1].sum(1), skewness[name] * effects[name].sqrt())
        observed[name] = float(z.abs().max())
    signs = random_signs(torch.zeros(N // 5, dtype=torch.float64), FEW["seed"], FEW["n_replicates"])
    flipped = (torch.stack(residuals) @ signs.T).abs().amax(1)  # (slices, replicates)
    order = sorted(range(len(observed)), key=lambda k: -observed[apart.slice[k]])
    least, before = {}, 0.0
    for k, j in enumerate(order):
        name = apart.slice[j]
        n_larger = int((flipped[order[k:]].amax(0) >= observed[name]).sum())
        before = max(before, (1 + n_larger) / (1 + FEW["n_replicates"]))
        least[name] = before
    spreads = dict(zip(apart.slice, apart.spread, strict=True))
    for row in found.rows():  # the variance of a bin is that of its mean confidence
        name = row["slice"]
        assert row["p_value"] >= least[name] - 1e-9
        assert row["statistic"] == pytest.approx(observed[name], rel=5e-3)
        assert row["spread"] == pytest.approx(spreads[name] * float(effects[name][0]) ** 0.5, rel=5e-3)
    worst = max(observed, key=observed.get)
    assert found.slice[0] == worst == "age=old, sex=1"
    assert found.p_value[0] == least[worst] == 0.01


def columns_in(name):
    return [part.split("=")[0] for part in name.split(", ")]


def test_dependent_rows_of_slices_and_of_reports_need_larger_errors():
    twice = [torch.cat((x, x)) for x in (P, Y)]
    columns, clusters = {"age": np.tile(AGE, 2), "sex": SEX.repeat(2)}, torch.arange(N).repeat(2)
    apart = tc.slices(*twice, columns, **FEW)
    together = tc.slices(*twice, columns, clusters=clusters, **FEW)
    widths = [dict(zip(table.slice, table.spread, strict=True)) for table in (apart, together)]
    assert all(widths[1][name] > 1.3 * width for name, width in widths[0].items())
    assert together.smallest_p_value >= apart.smallest_p_value
    apart = tc.report(*twice, groups=columns, **QUICK).slices
    together = tc.report(*twice, groups=columns, clusters=clusters, **QUICK).slices
    assert together.critical_value * together.spread[0] > 1.3 * apart.critical_value * apart.spread[0]


def test_the_transform_increases_and_removes_the_skewness_of_a_gamma_distribution():
    z = torch.linspace(-30, 30, 1001, dtype=torch.float64)
    for skewness in (-0.6, -0.01, 0.0, 1e-5, 0.01, 0.6):
        w = without_skewness(z, torch.tensor(skewness, dtype=torch.float64))
        assert bool((w.diff() > 0).all())
        if abs(skewness) < 1e-3:
            assert torch.allclose(w, z, rtol=1e-2, atol=1e-3)
    gamma = torch._standard_gamma(torch.full((200_000,), 11.0, dtype=torch.float64), generator=G)
    w = without_skewness((gamma - 11) / 11**0.5, torch.tensor(2 / 11**0.5, dtype=torch.float64))
    assert float((w - w.mean()).pow(3).mean()) == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("kind", ["logits", "frame", "top label", "confidence", "soft targets"])
def test_kinds_of_predictions(kind):
    plain = tc.slices(P, Y, COLUMNS, **FEW)
    if kind == "logits":
        found = tc.slices(P.logit(), Y, COLUMNS, **FEW)
    elif kind == "frame":
        frame = pytest.importorskip("pandas").DataFrame({"age": AGE, "sex": SEX.numpy(), "x": X.numpy()})
        found = tc.slices(P.tolist(), Y.long().tolist(), frame, **FEW)
    elif kind == "top label":
        probs = torch.stack((1 - P, P), -1)
        right = (P > 0.5).long() == Y
        found = tc.slices(probs, Y.long(), COLUMNS, **FEW)
        plain = tc.slices(probs.amax(-1), right.long(), COLUMNS, **FEW)
    elif kind == "confidence":
        found = tc.slices(P, Y, COLUMNS, task="confidence", **FEW)
    else:
        found = tc.slices(P, 0.9 * Y + 0.05, COLUMNS, **FEW)
        assert found.n_slices == plain.n_slices
        return
    assert found.slice == plain.slice
    assert found.gap == pytest.approx(plain.gap, abs=1e-9)
    assert found.p_value == plain.p_value


def test_a_report_has_the_slices_of_its_columns_of_groups(tmp_path):
    columns = {"age": AGE, "sex": SEX}
    table = tc.slices(WRONG, Y, columns)
    report = tc.report(WRONG, Y, groups=columns, **QUICK)
    found = report.slices
    assert found.n_slices == table.n_slices == 11
    assert len(found) == 10
    rows = {row["slice"]: row for row in table.rows()}
    for row in found.rows():
        for name in ("n", "gap", "ece", "shrunk", "detectable"):
            assert row[name] == pytest.approx(rows[row["slice"]][name], rel=0.1 if name == "detectable" else 1e-9)
    assert found.slice[0] == "age=old, sex=1"
    assert report.flat()["slices/p_value"] == found.smallest_p_value < 0.01
    assert "significantly miscalibrated" in str(report)
    report.save(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "age=old, sex=1" in page
    assert "Signed errors of the largest slices" in page
    saved = json.loads((tmp_path / "report.json").read_text())["slices"]
    assert saved["slice"] == list(found.slice)
    assert tc.report(WRONG, Y, groups=SEX, **QUICK).slices is None
    of_labels = tc.report(torch.stack((P, P), 1), torch.stack((Y, Y), 1).long(), "multilabel", groups=columns, **QUICK)
    assert of_labels.slices is None
    assert any("Slices are omitted" in note for note in of_labels.notes)


def test_tables_of_slices_without_rows_or_findings():
    nothing = tc.slices(P, Y, COLUMNS, min_size=N + 1)
    assert (len(nothing), nothing.n_slices, nothing.sentence) == (0, 0, "no slice has enough rows")
    assert math.isnan(nothing.smallest_p_value)
    assert "no slice has enough rows" in str(nothing)
    assert nothing.plot().get_title(loc="left")
    assert "none of" in str(tc.slices(P, Y, {"sex": SEX}))
    constant = tc.slices(torch.ones(200), torch.ones(200), {"sex": SEX[:200]}, task="binary", **FEW)
    assert constant.p_value == (1.0, 1.0)


def test_a_diagram_shows_the_largest_slices():
    table = tc.slices(WRONG, Y, COLUMNS, **FEW)
    ax = table.plot(most=3)
    shown = [label.get_text() for label in ax.get_yticklabels()]
    assert shown == [name for _, name in sorted(zip(table.n, table.slice, strict=True), reverse=True)[:3]]
    frame = table.to_pandas() if pytest.importorskip("pandas") else None
    assert frame.loc["age=old, sex=1", "gap"] < 0

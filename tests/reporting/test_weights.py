"""Weights of reports: floating ones express importance in any unit, and integers are copies of rows."""

import json
import math

import pytest
import torch
from helpers.kernels import F64

import torchcalib as tc
from torchcalib.inference import calibration_test
from torchcalib.reporting.building import ReportBuilder

QUICK = {"with_calibration": False, "with_intervals": False}


def rows(n=300, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    log_odds = torch.randn(n, generator=generator, dtype=F64)
    y = (torch.rand(n, generator=generator, dtype=F64) < log_odds.sigmoid()).long()
    return (scale * log_odds).sigmoid(), y, torch.rand(n, generator=generator, dtype=F64) + 0.1


def numbers(report):
    """Return value, floor, p-value and interval of every line, which are equal for weights in any unit."""
    found = {}
    for line in report.lines:
        ends = (math.nan,) * 2 if line.interval is None else (line.interval.low, line.interval.high)
        evidence = (math.nan if x is None else x for x in (line.noise_floor, line.p_value))
        found[line.key] = [line.value, *evidence, *ends]
    return found


def words(report):
    decision = report.decision
    return decision.verdict, decision.cause, decision.action, report.notes


def given(task, scale):
    p, y, weights = rows(scale=scale)
    if task == "multilabel":
        return {"preds": torch.stack((p, 1 - p), -1), "target": torch.stack((y, y), -1), "weights": weights}
    if task == "multiclass":
        return {"preds": torch.stack((p, 0.7 * (1 - p), 0.3 * (1 - p)), -1), "target": 1 - y, "weights": weights}
    return {"preds": p, "target": y, "weights": weights}


@pytest.mark.parametrize(("task", "scale"), [("binary", 2.5), ("multiclass", 1.0), ("multilabel", 2.5)])
def test_reports_do_not_depend_on_the_unit_of_floating_weights(task, scale):
    columns = given(task, scale)
    groups = (torch.arange(300) % 3).tolist()
    options = {"task": task, "groups": groups, **(QUICK if task != "binary" else {})}
    first = tc.report(**columns, **options)
    for factor in (0.01, 100.3):
        scaled = tc.report(**{**columns, "weights": columns["weights"] * factor}, **options)
        assert words(scaled) == words(first)
        expected = numbers(first)
        for key, found in numbers(scaled).items():
            assert found == pytest.approx(expected[key], rel=1e-9, abs=1e-12, nan_ok=True), key


@pytest.mark.parametrize("factor", [1.0, 100.0, 1 / 500])
def test_advised_number_of_samples_does_not_depend_on_the_unit_of_weights(factor):
    p, y, _ = rows(60)
    plain = tc.report(p, y, task="binary", **QUICK)
    assert "Evaluate the model on about" in plain.decision.action
    weighted = tc.report(p, y, task="binary", weights=torch.full((60,), factor, dtype=F64), **QUICK)
    assert weighted.decision.action == plain.decision.action


def test_interval_of_the_accuracy_of_confidences_uses_the_effective_number():
    p, y, weights = rows()
    found = []
    for w in (None, torch.full((300,), 100.0), weights, weights / 100):
        builder = ReportBuilder(task="confidence", with_calibration=False)
        builder.update(p, y, weights=w)
        found.append(builder.report().line("accuracy").interval)
    plain, constant, weighted, scaled = found
    assert (constant.low, constant.high) == pytest.approx((plain.low, plain.high), rel=1e-12)
    assert (scaled.low, scaled.high) == pytest.approx((weighted.low, weighted.high), rel=1e-9)
    assert weighted.high - weighted.low > plain.high - plain.low


@pytest.mark.parametrize(
    ("highest", "is_warned"), [(1, None), (3, False), (99, True)], ids=["ones", "counts", "survey weights"]
)
def test_reports_say_how_many_samples_integer_weights_count_as(highest, is_warned):
    p, y, _ = rows()
    weights = torch.randint(1, highest + 1, (300,), generator=torch.Generator().manual_seed(1))
    report = tc.report(p, y, task="binary", weights=weights, **QUICK)
    found = [note for note in report.notes if "count as" in note]
    if is_warned is None:
        assert not found
        return
    (note,) = found
    assert note.startswith(f"300 rows count as {int(weights.sum()):,} samples")
    assert ("pass floating weights" in note) == is_warned == (note in report.warnings)
    assert note in json.dumps(report.to_dict())
    assert not any("count as" in note for note in tc.report(p, y, task="binary", weights=weights.double()).notes)


def test_rank_based_errors_have_no_p_value_with_floating_weights():
    p, y, _ = rows()
    plain, report, copies = (
        tc.report(p, y, task="binary", weights=w, with_calibration=False)
        for w in (torch.ones(300), torch.full((300,), 2.0), torch.full((300,), 2))
    )
    for key in ("ace/positive", "tce/positive", "ks/positive", "atb/positive", "mcb/positive"):
        line = report.line(key)
        assert (line.p_value, line.noise_floor) == (None, None)
        assert None not in (plain.line(key).p_value, copies.line(key).p_value)
    assert report.line("ece/positive").p_value == plain.line("ece/positive").p_value
    (note,) = (note for note in report.notes if "floating weights do not count samples" in note)
    assert note.startswith("Noise floor and p of ACE, TCE, KS")


@pytest.mark.parametrize("name", ["ACE", "TCE", "KS", "ATB", "CORP", "ICI"])
def test_rank_based_errors_have_no_test_for_floating_weights(name):
    p, y, _ = rows()
    twos = torch.full((300,), 2.0)
    floats, mask, counts, merged = (getattr(tc, name)(task="binary") for _ in range(4))
    for metric, weights in ((floats, twos), (mask, twos / 2), (counts, twos.long()), (merged, None)):
        metric.update(p, y, weights=weights)
    assert float(floats.compute()) == float(counts.compute())
    for metric in (mask, counts, mask.from_bytes(mask.state_bytes())):
        assert 0 < float(metric.test(n_replicates=9).p_value) <= 1
    merged.merge_state(floats)
    grouped, clustered = tc.ByGroup(merged, num_groups=2), tc.Clustered(merged)
    grouped.update(p, y, weights=twos, groups=torch.arange(300) % 2)
    clustered.update(p, y, weights=twos, clusters=torch.arange(300) // 2)
    tested = [floats, merged, floats.from_bytes(floats.state_bytes()), grouped, clustered]
    for test in (
        *(each.test for each in tested),
        grouped.worst,
        lambda: calibration_test(counts, p, y, weights=twos),
    ):
        with pytest.raises(ValueError, match="`weights` must be integers, which count copies"):
            test()


def test_comparisons_have_no_chance_of_rank_based_errors_with_floating_weights():
    p, y, _ = rows()
    twos = torch.full((300,), 2.0)
    for weights, is_counted in ((twos, False), (twos / 2, True), (twos.long(), True)):
        found = tc.compare({"a": p, "b": p.square()}, y, task="binary", weights=weights, n_replicates=39)
        for line in found.lines:
            difference = line.differences["b"]
            if line.key in ("ace/positive", "tce/positive", "ks/positive", "atb/positive", "mcb/positive"):
                assert (difference.p_value is not None) == (difference.chance is not None) == is_counted, line.key
            elif line.key == "ece/positive":
                assert difference.p_value is not None
        assert any("floating weights do not count samples" in note for note in found.notes) == (not is_counted)


@pytest.mark.parametrize("bins", ["equal_width", "equal_mass", "pava", [0, 0.3, 0.7, 1]])
def test_tables_of_bins_do_not_depend_on_the_unit_of_floating_weights(bins):
    g = torch.Generator().manual_seed(0)
    p = torch.rand(300, generator=g, dtype=torch.float64)
    y = torch.bernoulli(p, generator=g).long()
    how = {"task": "binary", "bins": bins} | ({} if isinstance(bins, list) or bins == "pava" else {"n_bins": 5})
    plain = tc.calibration_curve(p, y, **how)
    for weight in (1.0, 100.0):
        table = tc.calibration_curve(p, y, **how, weights=torch.full((300,), weight))
        for name in ("effective_n", "confidence", "frequency", "band_low", "band_high"):
            torch.testing.assert_close(getattr(table, name), getattr(plain, name), equal_nan=True)

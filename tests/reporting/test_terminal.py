"""First numbers of a report, and terminal output: short by default, complete with `everything`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.logs import lm_eval_row, write_lines
from helpers.reports import QUICK, TASKS, full_report
from helpers.systems import compared

import torchcalib as tc
from torchcalib.display.words import ends, percent, significant
from torchcalib.io.errors import short_name
from torchcalib.reporting.render.contents import KeyNumber, first_screen, key_numbers
from torchcalib.results.comparison import compared_verdict, system_table
from torchcalib.results.history import History, HistoryRow

terminal = pytest.importorskip("torchcalib.reporting.render.terminal")
LINES, CHARACTERS = 40, 120


def printed(capsys, show, *given):
    """Return the printed lines without trailing spaces, and their words."""
    show(*given)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    return lines, " ".join(" ".join(lines).split())


@pytest.mark.parametrize("task", TASKS)
def test_short_report_fits_a_screen_and_everything_has_all_lines(task, capsys):
    report = replace(full_report(task), notes=("a note",), history=History((HistoryRow(1, 1, {"nll": 0.5}),)))
    lines, words = printed(capsys, terminal.show, report)
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= CHARACTERS
    found = report.decision
    for text in (found.verdict, found.cause, f"What to do: {found.action}", "1 note and more tables: --all"):
        assert text in words
    assert report.history.summary in words
    for number in key_numbers(report):
        assert f"{number.name} {number.value} {number.detail}".strip() in words
    best, worst = report.calibration.best, max(report.class_lines, key=lambda line: line.excess, default=None)
    advised = " (advised)" if report.recommendation.best else ""
    shown = f"{best.calibrator}{advised} {percent(best.accuracy)} "
    if task == "multilabel":  # the worst labels replace the calibrators
        shown = f"{worst.index} {percent(worst.frequency)} {percent(worst.frequency - worst.gap)} "
    assert shown in words
    assert words.startswith(f"Calibration report of held_out.npz, {report.created}: ")
    assert "a note" not in words

    lines, words = printed(capsys, terminal.show, report, True)
    assert max(map(len, lines)) <= CHARACTERS
    for line in report.lines:
        assert f"{line.name} {significant(line.value)}".replace("−", "-") in words, line.key
    for text in (found.cause, "a note", report.recommendation.text, *report.calibration.notes):
        assert text in words
    assert all(line.calibrator in words for line in report.calibration.lines)


def test_short_comparison_fits_a_screen_and_everything_has_all_lines(capsys):
    comparison = compared("multiclass")
    lines, words = printed(capsys, terminal.show, comparison)
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= CHARACTERS
    assert all(sentence in words for sentence in comparison.sentences.values())
    assert "compared with" not in words
    _, words = printed(capsys, terminal.show, comparison, True)
    for name in ("sure", "noisy"):
        assert f"{name} compared with calibrated" in words
    for line in comparison.lines:
        assert f"{line.name} {significant(line.values['calibrated'])}".replace("−", "-") in words, line.key


def test_audit_fits_100_columns_and_begins_with_verdict_and_advice(tmp_path, monkeypatch, capsys):
    """Names of definitions, and a direction that is not significant, are long."""
    monkeypatch.setenv("COLUMNS", "100")
    rows = (lm_eval_row(k, ["option 1", "2", "three"], *each) for k, each in enumerate(_scores(40)))
    found = tc.audit(write_lines(tmp_path / "log.jsonl", rows), with_intervals=False, with_calibration=False)
    assert found["choices_per_character"] is found["choices_per_byte"], "shown once"
    lines, words = printed(capsys, terminal.show, found)
    (_, main) = next(iter(found.items()))
    decision = main.report.decision
    assert found.verdict == f"{decision.verdict} (choices)"
    first = (
        f"log.jsonl, {found.created}: {found.input_line} {found.verdict} {decision.cause} What to do: {decision.action}"
    )
    assert words.startswith(f"Audit of {first}")
    table = str(found).split("\n\n")[2].splitlines()
    for shown in (lines, table):
        assert max(map(len, shown)) <= 100
    header = next(k for k, line in enumerate(lines) if line.lstrip().startswith("confidence "))
    names = lines[header].split()
    assert names.index("ECE") < names.index("accuracy")
    assert names == table[1].split()


def _scores(n):
    """Return log-probabilities of three options, and the number of the right one."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    right = torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(-1)
    return zip(scores.log_softmax(-1).tolist(), right.tolist(), strict=True)


def test_written_files_are_named_with_their_folders(capsys):
    files = ["out/audit.json", "out/audit.html", "out/log_1/audit.html", "predictions.npz"]
    _, words = printed(capsys, terminal.show_paths, list(map(Path, files)))
    assert words == f"wrote {Path(files[1])} and audit.json, {Path('log_1/audit.html')}, predictions.npz"


def test_key_numbers_are_those_of_a_calculation_by_hand():
    """10 samples of probability 0.9 with 6 ones: NLL -0.6 log 0.9 - 0.4 log 0.1 = 0.984, of the frequencies 0.673."""
    given = {"task": "binary", "n_bins": 10, **QUICK}
    probs, target = torch.full((10,), 0.9, dtype=torch.float64), torch.arange(10) // 6 == 0
    report = tc.report(probs, target.long(), **given)
    ece, accuracy, nll, worst = key_numbers(report)
    assert accuracy == KeyNumber("Accuracy", "60.0%", "60.0% for always predicting the more frequent outcome")
    assert nll == KeyNumber("NLL", "0.984 nats", "146% of 0.673, the NLL of the class frequencies")
    assert (ece.name, ece.value) == ("ECE", "0.300")
    floor = f"{significant(report.main_line.noise_floor)} expected if calibrated"
    assert ece.detail.startswith(f"mean gap between probability and frequency, {floor}, p ")
    assert worst == KeyNumber("Worst range", "90.0% to 100%", "90.0% predicted, 60.0% observed")
    right = tc.report(torch.eye(3)[torch.arange(9) % 3], torch.arange(9) % 3, class_names=["a", "b", "c"], **QUICK)
    assert [number.name for number in key_numbers(right)] == ["ECE", "Accuracy", "NLL", "Worst class"]


def test_a_report_without_findings_shows_the_error_that_it_would_find():
    """2.80 standard errors of sqrt(0.09 / 100) have a power of 80%."""
    report = tc.report(torch.full((100,), 0.9), (torch.arange(100) < 90).long(), task="binary", **QUICK)
    found = KeyNumber("Detectable", "0.0840", "smallest mean error that is found with 80% probability")
    assert found in key_numbers(report)


def test_key_number_of_calibration_is_the_recommended_or_the_best_calibrator():
    report = full_report("binary")
    stage, (gain,) = report.calibration, [each for each in key_numbers(report) if each.name == "Gain by calibration"]
    interval = f"{stage.best.interval.low:.1f}% to {stage.best.interval.high:.1f}%"
    assert stage.recommendation.best == "affine scaling"
    assert gain == (gain.name, f"{stage.best.gain:.1f}% of NLL", f"affine scaling, 95% interval {interval}")


def test_first_screen_of_a_comparison_has_the_direction_of_each_system():
    """`sure` has too large logits. Directions follow the intervals of the signed error."""
    comparison = compared("multiclass")
    first = first_screen(comparison)
    assert (first.verdict, first.colour) == ("2 of 2 systems are worse calibrated than calibrated", "bad")
    details = {number.name: number.detail for number in first.numbers}
    assert details["calibrated"] == "baseline"
    assert details["sure"] == "worse calibrated, worse NLL, over-confident"
    interval = comparison["esce"].intervals["sure"]
    assert interval.high < 0


def test_a_report_on_floating_weights_has_the_effective_number_of_samples():
    """Kish: (sum w)^2 / sum w^2 = (0.5 + 1.5)^2 / (0.25 + 2.25) = 1.6 for each pair of rows."""
    preds, target = torch.rand(100, generator=torch.Generator().manual_seed(0)), torch.arange(100) % 2
    weighted = tc.report(preds, target, weights=torch.tensor([0.5, 1.5]).repeat(50), **QUICK)
    assert weighted.input_line.startswith(
        "binary (inferred from the shapes), n = 80 (effective number, sum of weights 100)"
    )
    assert ", n = 100, " in tc.report(preds, target, **QUICK).input_line


@pytest.mark.parametrize("task", TASKS)
def test_table_of_systems_has_a_row_for_each_system_with_its_differences(task):
    comparison = compared(task)
    (section,) = system_table(comparison).sections
    rows = {row.cells[0].page: [cell.page for cell in row.cells] for row in section.rows}
    assert list(rows) == list(comparison.systems)
    for name, cells in rows.items():
        assert cells[1] == compared_verdict(comparison, name)
        for place, key in ((2, "ece"), (4, "nll"), (6, "accuracy")):
            line = comparison[key]
            assert cells[place] == significant(line.values[name])
            found = line.differences.get(name)
            interval = "" if found is None else ends(found.interval.low, found.interval.high)
            expected = "" if found is None else f"{significant(found.beyond_chance)} ({interval})".replace("-", "−")
            assert cells[place + 1] == expected
    assert rows["calibrated"][1] == "baseline"
    assert rows["sure"][1] == "worse calibrated, worse NLL"
    assert short_name("x" * 30) == "x" * 14 + "…" + "x" * 13

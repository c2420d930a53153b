"""Groups in reports: the worst groups by name, over batches, files, parts and ranks."""

import pytest
import torch
from helpers.reports import MODES, QUICK, TASKS, bare, predictions

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.reporting.render import terminal
from torchcalib.reporting.render.html import render

GIVEN = {"task": "binary", **QUICK}
NAMES = [f"site {letter}" for letter in "abcdefgh"]


def data(n=1_600):
    """Return calibrated predictions except at one site, outcomes and sites; another site is empty."""
    g = torch.Generator().manual_seed(0)
    groups = (torch.rand(n, generator=g) ** 2 * 8).long()
    groups[groups == 6] = 0
    p = torch.rand(n, generator=g, dtype=torch.float64) * 0.6
    return p, (torch.rand(n, generator=g) < p + 0.3 * (groups == 3)).long(), groups


def as_rows(report):
    return {row["group"]: row for row in report.groups.rows()}


def assert_close(a, b):
    assert a.keys() == b.keys()
    for group, row in a.items():
        for name in ("n", "value", "noise_floor", "p_value", "shrunk"):
            assert row[name] == pytest.approx(b[group][name], rel=1e-9, abs=1e-12), (group, name)


@pytest.mark.parametrize("task", TASKS)
def test_groups_have_the_weighted_error_of_the_main_mode(task):
    logits, target = predictions(task)
    weights, groups = torch.arange(200) % 3, torch.arange(200) % 4
    groups[9], groups[12] = -1, -77  # rows of weight 0, whose groups are not checked
    logits[20] = torch.nan
    options = {"task": task, "from_logits": True, "nan_policy": "drop"}
    found = as_rows(tc.report(logits, target, weights=weights, groups=groups, **{**GIVEN, **options}))
    assert set(found) == {"0", "1", "2", "3"}
    for k in range(4):
        rows = groups == k
        value = F.ece(logits[rows], target[rows], weights=weights[rows], mode=MODES[task][0], **options)
        assert found[str(k)]["value"] == pytest.approx(float(value))


def test_the_worst_group_is_first():
    p, y, groups = data()
    report = tc.report(p, y, groups=groups, group_names=NAMES, **GIVEN)
    table = report.groups
    assert (table.n_groups, table.group[0], table.p_value[0] < 0.01) == (7, "site d", True)


def test_long_similar_names_are_shown_with_their_differences(capsys):
    pytest.importorskip("rich")
    p, y, groups = data(400)
    alike = ["a" * 500 + letter + "z" * 499 for letter in "bc"]
    report = tc.report(p, y, groups=groups, group_names=[*alike, "m" * 1000, *NAMES[3:]], **GIVEN)
    terminal.show(report, everything=True)
    column = "".join("".join(line[:25].split()) for line in capsys.readouterr().out.splitlines())
    for text in (str(report), column, render(bare(report))):
        assert all(name in text for name in alike), "the differences of the names are not omitted"
        assert "m" * 900 not in text

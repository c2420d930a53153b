"""Values of every metric equal those of slow loops, with and without weights and ties.

Gradients equal finite differences of the values; see test_laws_of_values.py.
"""

from dataclasses import replace
from itertools import chain

import oracles
import pytest
import torch
from cases import CALLS, N_CLASSES, OPTIONS, Case
from helpers.samples import tied
from oracles import input as slow
from oracles import ranked

import torchcalib as tc
import torchcalib.functional as F

N = 35


def name_of(case):
    return (case.cls or case.function).__name__


def oracle(case, preds, target, weights=None):
    settings = {name: v.tolist() if name == "priors" else v for name, v in case.options.items()}
    reading = {name: settings.pop(name) for name in ("from_logits", "positive_classes") if name in settings}
    reading = {"from_logits": False, **reading}
    call = slow.Call(case.function, case.cls, case.task, N_CLASSES, settings, reading, preds, target, weights)
    call.own = case.own
    return slow.expected(call)[0]


def weights_of(case):
    """Return weights of which some are 0: counts if the loop can only count rows."""
    weights = torch.rand(N, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights[::5] = 0
    return weights.mul(4).round() if case.whole_weights else weights


def samples(case):
    """Yield (description, case, predictions, targets, weights)."""
    if case in OPTIONS:
        preds, target = tied(case.task, 2 * N, zeros=False)
        untied = case.options.get("ties") == "split"  # each row may only have copies if it has no ties
        yield "ties", case, preds, target, None
        weights = torch.arange(2 * N) % 2 if untied else torch.arange(2 * N) % 4
        yield "weighted ties", case, preds, target, weights
        if isinstance(case.options.get("mode"), tc.TopK):
            yield "soft targets", case, preds, preds.flip(0), None
        return
    for seed in range(1 if case.cls is tc.SmECE else 2):  # its loop is slow
        yield f"seed {seed}", case, *case.data(N, seed=seed), None
    yield "weighted", case, *case.data(N), weights_of(case)
    if case.cls is None:  # test_fuzz.py has soft targets of metrics
        preds, target = case.data(N)
        shares = preds.softmax(-1) if case.task == "multiclass" else preds.sigmoid()
        yield "soft targets", case, preds, shares.flip(0), weights_of(case)
    counts_rows = case.whole_weights and case.cls not in (tc.Cox, tc.ICI) and "positive_classes" not in case.options
    if counts_rows or case.cls is None:
        of_probabilities = replace(case, options={**case.options, "from_logits": False})
        for weights in (None, weights_of(case)):
            yield "ties", of_probabilities, *tied(case.task, N, zeros=False), weights


@pytest.mark.parametrize("name", dict.fromkeys(map(name_of, CALLS)))
def test_values_equal_slow_loops(name):
    """The loop has no choice of a bandwidth by likelihood; see tests/metrics/test_kernel.py."""
    # Sums of N terms; fits of smooth errors stop at a change of 1e-10.
    rtol, atol = (1e-9, 1e-10) if name.lower() in slow.BINLESS else (1e-11, 1e-12)
    of_class = [
        case for case in CALLS + OPTIONS if name_of(case) == name and case.options.get("bandwidth") != "likelihood"
    ]
    for what, case, preds, target, weights in chain.from_iterable(map(samples, of_class)):
        found, expected = case.call(preds, target, weights=weights), oracle(case, preds, target, weights)
        message = f"{case}, {what}{'' if weights is None else ', weighted'}"
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda m, w=message: f"{w}: {m}")


MODES = [(task, mode) for task, allowed in slow.MODES.items() for mode in allowed]


def curves(task, mode, from_logits, **options):
    """Yield confidences, outcomes, weights and ECDs of the events of a batch element, with the columns of its table."""
    case = Case("table", F.calibration_curve, tc.ECE, task, {"from_logits": from_logits, "mode": mode, **options})
    preds, target = case.data(n=60)
    weights = torch.arange(60) % 3
    table = case.call(preds, target, weights=weights)
    columns = {name: torch.from_numpy(column) for name, column in table.to_dict().items()}
    columns = {name: column.reshape(-1, column.shape[-1]) for name, column in columns.items()}
    reading = {"from_logits": from_logits, "ignore_index": None, "positive_classes": None}
    found = 0
    for rows in slow.series(preds, target, weights, task, whole=False, **reading):
        events = slow.events(rows, *((task, mode) if task != "multilabel" else ("binary", "positive")))
        for k, column in enumerate(events):
            scored = rows
            if task == "multiclass" and mode == "classwise":
                scored = [slow.binary_row(row.q[k], row.t[k], row.w, False) for row in rows]
            _, confidence, outcome, held, _ = zip(*column, strict=True)
            scores = [oracles.ecd_of(row.q, row.t) for row in scored]
            yield (confidence, outcome, held, scores), {name: column[found] for name, column in columns.items()}
            found += 1
    assert found == len(columns["n"])


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize(("task", "mode"), MODES)
def test_calibration_curve_equals_slow_loop(task, mode, from_logits):
    """Check every column, including the mean entropic calibration difference (ECD) for each mode."""
    for (confidence, outcome, held, scores), columns in curves(task, mode, from_logits, n_bins=6):
        bins = oracles.bins(confidence, outcome, held, 6, extra=scores)
        assert [b for b, *_ in bins] == columns["n"].nonzero().flatten().tolist()
        for b, n, mean_confidence, frequency, mean_ecd in bins:
            row = {name: column[b].item() for name, column in columns.items()}
            assert (row["lower"], row["upper"], row["n"]) == (b / 6, (b + 1) / 6, n)
            expected = [n / sum(held), mean_confidence, frequency, frequency - mean_confidence, mean_ecd]
            found = [row[name] for name in ("share", "confidence", "frequency", "gap", "ecd")]
            assert found == pytest.approx(expected, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("bins", ["equal_mass", "pava", [0.0, 0.2, 0.55, 1.0]], ids=str)
@pytest.mark.parametrize(("task", "mode"), MODES)
def test_calibration_curve_has_the_ecd_of_every_bin_rule(task, mode, bins):
    """Loop over the blocks of samples, with the ECD of a sample by [ECD] eq. 12 and 15."""
    for from_logits in (False, True):
        for (confidence, outcome, held, scores), columns in curves(task, mode, from_logits, bins=bins, n_bins=6):
            counts, labels = list(map(int, held)), list(map(int, outcome))
            blocks = ranked.blocks_of(bins, confidence, labels, counts, n_bins=6)
            held_in = [[held[i] for i in block] for block in blocks]
            means = [oracles.mean([scores[i] for i in block], own) for block, own in zip(blocks, held_in, strict=True)]
            used = columns["n"] > 0
            assert columns["n"][used].tolist() == list(map(sum, held_in))
            assert columns["ecd"][used].tolist() == pytest.approx(means, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("from_logits", [False, True])
def test_streams_have_the_ecd_of_bins_of_binary_events(from_logits):
    for task, mode in MODES:
        case = Case("ace", F.ace, tc.ACE, task, {"from_logits": from_logits, "mode": mode, "n_bins": 6})
        preds, target = case.data(n=60)
        sizes = {"binary": {}, "multiclass": {"num_classes": N_CLASSES}, "multilabel": {"num_labels": N_CLASSES}}
        metric = case.metric(**sizes[task])
        for piece in (slice(25), slice(25, None)):
            metric.update(preds[piece], target[piece], weights=torch.arange(60)[piece] % 3)
        given = {"task": task, "mode": mode, "from_logits": from_logits, "bins": "equal_mass", "n_bins": 6}
        expected = F.calibration_curve(preds, target, weights=torch.arange(60) % 3, **given).ecd
        if (task, mode) == ("multiclass", "top_label"):  # it depends on all probabilities
            expected = torch.full_like(expected, torch.nan)
            with pytest.raises(ValueError, match="`with_ecd` must be False for the top label"):
                tc.ACE(task, num_classes=N_CLASSES, with_ecd=True)
        torch.testing.assert_close(metric.bin_table().ecd, expected, rtol=1e-11, atol=1e-12, equal_nan=True)

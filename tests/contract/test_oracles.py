"""Values of every metric equal those of slow loops, with and without weights and ties.

Gradients equal finite differences of the values; see test_laws_of_values.py. Kernel errors, which form blocks, have
their loops in tests/metrics/test_kernel.py.
"""

from dataclasses import replace
from itertools import chain

import oracles
import pytest
import torch
from cases import CASES, N_CLASSES, Case
from helpers.samples import tied
from oracles import input as slow

import torchcalib as tc
import torchcalib.functional as F

CLASSES = {case.cls.__name__: case.cls for case in CASES if not case.in_blocks}
N = 35


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
    return weights.mul(4).round() if case.whole_weights or case.options.get("debiased") else weights


def samples(case):
    """Yield (description, case, predictions, targets, weights)."""
    for seed in range(1 if case.cls is tc.SmECE else 3):  # its loop is slow
        yield f"seed {seed}", case, *case.data(N, seed=seed), None
    yield "weighted", case, *case.data(N), weights_of(case)
    if case.whole_weights and case.cls not in (tc.Cox, tc.ICI) and "positive_classes" not in case.options:
        of_probabilities = replace(case, options={**case.options, "from_logits": False})
        for weights in (None, weights_of(case)):
            yield "ties", of_probabilities, *tied(case.task, N, zeros=False), weights


@pytest.mark.parametrize("name", CLASSES)
def test_values_equal_slow_loops(name):
    # Sums of N terms; fits of smooth errors stop at a change of 1e-10.
    rtol, atol = (1e-9, 1e-10) if name.lower() in slow.BINLESS else (1e-11, 1e-12)
    of_class = [case for case in CASES if case.cls is CLASSES[name]]
    for what, case, preds, target, weights in chain.from_iterable(map(samples, of_class)):
        found, expected = case.call(preds, target, weights=weights), oracle(case, preds, target, weights)
        message = f"{case}, {what}{'' if weights is None else ', weighted'}"
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda m, w=message: f"{w}: {m}")


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize(("task", "mode"), [(task, mode) for task, allowed in slow.MODES.items() for mode in allowed])
def test_calibration_curve_equals_slow_loop(task, mode, from_logits):
    """Check every column, including the mean entropic calibration difference (ECD) for each mode."""
    options = {"from_logits": from_logits, "mode": mode, "n_bins": 6}
    case = Case("table", F.calibration_curve, tc.ECE, task, options)
    preds, target = case.data(n=60)
    weights = torch.arange(60) % 3
    table = case.call(preds, target, weights=weights)
    columns = {name: torch.from_numpy(column).reshape(-1, 6) for name, column in table.to_dict().items()}
    reading = {"from_logits": from_logits, "ignore_index": None, "positive_classes": None}
    event_columns = []  # (confidence, outcome, weight, ECD) for each batch element
    for rows in slow.series(preds, target, weights, task, whole=False, **reading):
        events = slow.events(rows, *((task, mode) if task != "multilabel" else ("binary", "positive")))
        for k, column in enumerate(events):
            if task == "multiclass" and mode == "classwise":
                scored = [slow.binary_row(row.q[k], row.t[k], row.w, False) for row in rows]
            else:
                scored = rows
            _, confidence, outcome, held, _ = zip(*column, strict=True)
            event_columns.append((confidence, outcome, held, [oracles.ecd_of(row.q, row.t) for row in scored]))
    assert len(event_columns) == len(columns["n"])
    for k, (confidence, outcome, held, scores) in enumerate(event_columns):
        bins = oracles.bins(confidence, outcome, held, 6, extra=scores)
        assert [b for b, *_ in bins] == columns["n"][k].nonzero().flatten().tolist()
        for b, n, mean_confidence, frequency, mean_ecd in bins:
            row = {name: column[k, b].item() for name, column in columns.items()}
            assert (row["lower"], row["upper"], row["n"]) == (b / 6, (b + 1) / 6, n)
            expected = [n / sum(held), mean_confidence, frequency, frequency - mean_confidence, mean_ecd]
            found = [row[name] for name in ("share", "confidence", "frequency", "gap", "ecd")]
            assert found == pytest.approx(expected, rel=1e-11, abs=1e-12)

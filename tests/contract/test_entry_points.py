"""Function, class, report, file and command line give the same numbers for every shape and array-like.

The expected value is that of the function for tensors `(N,)` or `(N, C)`; `test_oracles` compares it with loops.
"""

import numpy as np
import pytest
import torch
from cases import N_CLASSES, formulas
from helpers.compare import close
from helpers.reports import QUICK, QUICK_COMMAND

import torchcalib as tc
from torchcalib.cli import main
from torchcalib.reporting.building import ReportBuilder

N = 48

SHAPES = {  # transforms of (N,) or (N, C) predictions and (N,) targets
    "binary": {
        "(N,)": lambda p, y: (p, y),
        "(N, 1)": lambda p, y: (p.unsqueeze(1), y.unsqueeze(1)),
        "(N, 1) and (N,)": lambda p, y: (p.unsqueeze(1), y),
        "(N,) and (N, 1)": lambda p, y: (p, y.unsqueeze(1)),
        "(N, H, W)": lambda p, y: (p.reshape(2, 4, 6), y.reshape(2, 4, 6)),
    },
    "multiclass": {
        "(N, C)": lambda p, y: (p, y),
        "(N, C, H, W)": lambda p, y: (p.reshape(2, 3, 8, N_CLASSES).movedim(-1, 1), y.reshape(2, 3, 8)),
        "(B, T, C)": lambda p, y: (p.reshape(2, 24, N_CLASSES), y.reshape(2, 24)),
    },
}


REFUSED_IN_FILES = {"(N,) and (N, 1)": "Shapes must be (N,)", "(N, C, H, W)": "Move the class axis to the end"}
"""Files are read in pieces of rows, so that the class axis must be the last one."""


def frame(x):
    """Return a pandas Series or DataFrame for 1 or 2 axes, otherwise an array."""
    pandas = pytest.importorskip("pandas")
    kind = {1: pandas.Series, 2: pandas.DataFrame}.get(x.dim())
    return x.numpy() if kind is None else kind(x.numpy())


KINDS = {"tensor": lambda x: x, "numpy": torch.Tensor.numpy, "pandas": frame, "list": torch.Tensor.tolist}


@pytest.mark.parametrize("case", formulas(lambda case: case.task != "multilabel"))
def test_functions_and_classes_give_equal_values_for_every_shape_and_array_kind(case):
    preds, target = case.data(N)
    expected = case.call(preds, target)
    shapes, kinds = SHAPES[case.task], list(KINDS.values())
    for k, shaped in enumerate(shapes.values()):
        p, y = shaped(preds, target)
        kind = kinds[k % len(kinds)]
        given = {"task": case.task, **case.options}
        close(case.function(kind(p), kind(y), **given), expected)
        metric = case.metric()
        for rows in (slice(0, 1), slice(1, len(p))) if not case.in_blocks else [slice(None)]:
            metric.update(kinds[k % 2](p[rows]), kinds[k % 2](y[rows]))
        close(metric.compute(), expected.double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", SHAPES)
def test_every_array_kind_gives_the_value_of_tensors(task, kind):
    case = next(param.values[0] for param in formulas() if param.values[0].name.startswith(f"ece-{task}"))
    preds, target = case.data(N)
    weights = torch.arange(N) % 3
    expected = case.call(preds, target, weights=weights)
    given = [KINDS[kind](x) for x in (preds, target)]
    for name in ("weights", "sample_weight"):
        found = case.function(*given, task=task, **case.options, **{name: KINDS[kind](weights)})
        close(found, expected)


# Each shape with probabilities or logits in turn; both in the extended run
ENTRIES = [
    pytest.param(task, shape, (k + j) % 2 == 1, marks=pytest.mark.extended if j else ())
    for k, (task, shape) in enumerate((task, shape) for task in SHAPES for shape in SHAPES[task])
    for j in (0, 1)
]


@pytest.mark.parametrize(("task", "shape", "from_logits"), ENTRIES)
def test_reports_files_and_command_line_give_equal_values_for_every_shape(task, shape, from_logits, tmp_path, capsys):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn((N,) if task == "binary" else (N, N_CLASSES), generator=generator, dtype=torch.float64)
    target = torch.randint(0, 2 if task == "binary" else N_CLASSES, (N,), generator=generator)
    preds = logits if from_logits else logits.sigmoid() if task == "binary" else logits.softmax(-1)
    given = {"task": task, "from_logits": from_logits}
    expected = tc.report(preds, target, **given, **QUICK)
    for name in ("nll", "brier", f"ece/{'positive' if task == 'binary' else 'top_label'}"):
        function = {"nll": tc.functional.nll, "brier": tc.functional.brier_score}.get(name, tc.functional.ece)
        assert expected[name] == pytest.approx(function(preds, target, **given).item(), rel=1e-9)
    p, y = SHAPES[task][shape](preds, target)
    values = {line.key: line.value for line in expected.lines}
    found = tc.report(p.numpy(), y.numpy(), **given, **QUICK)
    assert {line.key: line.value for line in found.lines} == pytest.approx(values, rel=1e-9, nan_ok=True)
    np.savez(tmp_path / "a.npz", **{"logits" if from_logits else "probs": p.numpy(), "targets": y.numpy()})
    saved = tmp_path / "state.pt"
    command = ["report", str(tmp_path / "a.npz"), "--task", task, "--save-state", str(saved), *QUICK_COMMAND]
    if shape in REFUSED_IN_FILES:
        assert main(command) == 2
        assert REFUSED_IN_FILES[shape] in capsys.readouterr().err
        return
    assert main(command) == 0, capsys.readouterr().err
    lines = ReportBuilder.load(saved).report().lines
    assert {line.key: line.value for line in lines} == pytest.approx(values, rel=1e-9, nan_ok=True)

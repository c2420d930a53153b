"""Frequency of right decisions in simulations: `python -m benchmarks.diagnosis` writes results/diagnosis.md.

The decision is computed as in a report, with 199 simulated replicates for the p-value of ECE. Intervals, affine scaling
and the cross-validation of calibrators are omitted, because they do not change the cause.
"""

import argparse
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.calibration import BiasCorrection, Calibrator, TemperatureScaling
from torchcalib.core.arguments import Task
from torchcalib.core.events import modes_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import BinStats
from torchcalib.inference.testing import ErrorTest, run_error_test
from torchcalib.metrics.binned import ECE, rmsce_from_bins
from torchcalib.metrics.groups.named import NamedGroupState
from torchcalib.reporting.calibration import FittedCalibrators, fitted
from torchcalib.reporting.catalogue import BY_CLASS, bins_of, catalogue_of
from torchcalib.reporting.decision import LEVEL
from torchcalib.reporting.findings import Findings, decide
from torchcalib.reporting.lines import Data as ReportData
from torchcalib.results.decision import Decision
from torchcalib.results.lines import Line

SIZES = (300, 1000, 5000)
NULL_SIZES = (100, 1000, 5000, 20_000)
N_REPLICATES = 199


class Data(NamedTuple):
    """Log-odds or logits, labels, and groups or None."""

    logits: Tensor
    labels: Tensor
    groups: Tensor | None = None


Simulation = Callable[[torch.Generator, int], Data]


def _line(name: str, value: float, naive: float = 0.0, floor: float | None = None, p: float | None = None) -> Line:
    given: dict[str, Any] = dict.fromkeys(("key", "name", "group", "unit", "question", "source"), name)
    return Line(**given, perfect=0.0, value=value, naive=naive, noise_floor=floor, p_value=p)


def decided(task: Task, data: Data) -> Decision:
    """Return the decision for simulated data, without advice on calibrators."""
    p = TemperatureScaling().read(data.logits, data.labels, task=task, options={"from_logits": True})
    fits: dict[type[Calibrator], Calibrator] = {
        each: fitted(each(), p) for each in (TemperatureScaling, BiasCorrection)
    }
    nll = {kind: p.with_values(fit.calibrated(p.values, True).to(p.dtype)).cross_entropy for kind, fit in fits.items()}
    return decide(found_in(task, p, data, fits, nll), None)


def found_in(
    task: Task,
    p: Predictions,
    data: Data,
    fits: dict[type[Calibrator], Calibrator],
    nll: dict[type[Calibrator], Tensor],
) -> Findings:
    """Return the findings for simulated data and calibrators that are fitted to it."""
    catalogue = catalogue_of(task)
    modes = modes_of(task)
    statistics = {name: catalogue.accumulators[name].from_predictions(p) for name in (BY_CLASS, *map(bins_of, modes))}
    accumulator = catalogue.accumulators[bins_of(modes[0])]
    groups = None
    if data.groups is not None:
        kind = NamedGroupState(accumulator, accumulator.shape(task, p.num_classes))
        of_groups = kind.from_groups(p, data.groups, None)
        groups = of_groups.names, kind.statistic(of_groups)
    reported = ReportData(catalogue, statistics, predictions=p, groups=groups)
    bins, average = statistics[bins_of(modes[0])], task == "multilabel"
    tested = run_error_test(ErrorTest(ECE.from_bins), bins, average=average, n_replicates=N_REPLICATES)
    frequency = _frequencies(p)
    naive = -float(torch.xlogy(frequency, frequency).sum(-1).mean())
    lines = {
        f"ece/{modes[0]}": _line(
            "ECE", *(float(x) for x in (tested.statistic, 0.0, tested.noise_floor, tested.p_value))
        ),
        "nll": _line("NLL", float(p.cross_entropy.mean()), naive),
        "brier": _line("Brier score", float(p.squared_error.mean()), 1.0),
    }
    for mode in modes:
        over_classes = mode == "classwise"
        lines[f"rmsce_debiased/{mode}"] = _line("RMSCE", _rmsce(statistics[bins_of(mode)], over_classes))
    of_labels = run_error_test(ErrorTest(ECE.from_bins), bins, n_replicates=N_REPLICATES) if average else None
    return Findings(
        data=reported,
        lines=lines,
        fits=FittedCalibrators(fits, nll),
        label_p_values=None if of_labels is None else of_labels.p_value,
    )


def _rmsce(bins: BinStats, average: bool) -> float:
    values = rmsce_from_bins(bins, debiased=True)
    return float(values.mean() if average else values)


def _frequencies(p: Predictions) -> Tensor:
    if p.task == "multiclass":
        return torch.bincount(p.target, minlength=p.num_classes).double() / p.target.numel()
    share = p.target.mean(-1)
    return torch.stack((1 - share, share), -1)


def _normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _uniform(g: torch.Generator, n: int) -> Tensor:
    return torch.rand(n, generator=g, dtype=torch.float64)


def _outcomes(g: torch.Generator, log_odds: Tensor) -> Tensor:
    return torch.bernoulli(log_odds.sigmoid(), generator=g).long()


def _labels(g: torch.Generator, logits: Tensor) -> Tensor:
    return torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(-1)


def _binary(change: Callable[[Tensor], Tensor], centre: float = 0.0) -> Simulation:
    """Return a simulation of log-odds with standard deviation 2, to which a change is applied after drawing labels."""

    def simulate(g: torch.Generator, n: int) -> Data:
        z = centre + 2 * _normal(g, n)
        return Data(change(z), _outcomes(g, z))

    return simulate


def _multiclass(change: Callable[[Tensor], Tensor], n_classes: int = 10) -> Simulation:
    def simulate(g: torch.Generator, n: int) -> Data:
        z = 2 * _normal(g, n, n_classes)
        return Data(change(z), _labels(g, z))

    return simulate


def _multilabel(change: Callable[[Tensor], Tensor]) -> Simulation:
    def simulate(g: torch.Generator, n: int) -> Data:
        z = 2 * _normal(g, n, 5)
        return Data(change(z), _outcomes(g, z))

    return simulate


def _noisy(rate: float, n_classes: int, flipped: bool = False) -> Simulation:
    """Replace labels by random ones, or by the other label of a binary task if `flipped`."""

    def simulate(g: torch.Generator, n: int) -> Data:
        z = 2 * _normal(g, n) if n_classes == 2 else 2 * _normal(g, n, n_classes)
        labels = _outcomes(g, z) if n_classes == 2 else _labels(g, z)
        drawn = 1 - labels if flipped else torch.randint(n_classes, (n,), generator=g)
        return Data(z, torch.where(_uniform(g, n) < rate, drawn, labels))

    return simulate


def _grouped(n_groups: int, change: Callable[[Tensor, Tensor], Tensor], n_classes: int = 2) -> Simulation:
    """Apply a change of log-odds and group numbers."""

    def simulate(g: torch.Generator, n: int) -> Data:
        z = 2 * _normal(g, n) if n_classes == 2 else 2 * _normal(g, n, n_classes)
        groups = torch.randint(n_groups, (n,), generator=g)
        labels = _outcomes(g, z) if n_classes == 2 else _labels(g, z)
        return Data(change(z, groups if n_classes == 2 else groups[:, None]), labels, groups)

    return simulate


def _noisy_logits(g: torch.Generator, n: int) -> Data:
    z = 2 * _normal(g, n)
    return Data(z + 1.5 * _normal(g, n), _outcomes(g, z))


def _half(g: torch.Generator, n: int) -> Data:
    z = 2 * _normal(g, n)
    return Data(torch.where(_uniform(g, n) < 0.5, 2 * z, z / 2), _outcomes(g, z))


def _constant(g: torch.Generator, n: int) -> Data:
    return Data(torch.full((n,), -1.0, dtype=torch.float64), _outcomes(g, torch.full((n,), -1.0)))


def _confused(g: torch.Generator, n: int) -> Data:
    """Replace 30% of labels by class 2 where class 0 is predicted."""
    z = 2 * _normal(g, n, 10)
    is_changed = (z.argmax(-1) == 0) & (_uniform(g, n) < 0.3)
    return Data(z, torch.where(is_changed, 2, _labels(g, z)))


def _similar(g: torch.Generator, n: int) -> Tensor:
    """Return logits of 5 classes, of which classes 0 and 1 as well as 2 and 3 are similar."""
    common = 2 * _normal(g, n, 3)
    return common[:, [0, 0, 1, 1, 2]] + _normal(g, n, 5)


def _uniform_tail_of_similar(g: torch.Generator, n: int) -> Data:
    z = _similar(g, n)
    return Data(_uniform_tail(z), _labels(g, z))


def _clipped(z: Tensor, smallest: float = 0.01) -> Tensor:
    return z.sigmoid().clamp(smallest, 1 - smallest).logit()


def _rounded(z: Tensor) -> Tensor:
    return (z.sigmoid() * 200).round().clamp(1, 199).div(200).logit()


def _swapped(z: Tensor) -> Tensor:
    """Swap the logits of classes 3 and 4 where none of them is the top class."""
    is_below = (z.argmax(-1) != 3) & (z.argmax(-1) != 4)
    return torch.where(is_below.unsqueeze(-1), z[:, [0, 1, 2, 4, 3]], z)


def _ranks_swapped(z: Tensor) -> Tensor:
    """Swap the second and third largest logit of each row."""
    values, order = z.sort(-1, descending=True)
    values = torch.cat((values[:, :1], values[:, 2:3], values[:, 1:2], values[:, 3:]), -1)
    return torch.zeros_like(z).scatter(-1, order, values)


def _tail(z: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change the probabilities of the classes below the top label, and keep their sum."""
    q = z.softmax(-1)
    top = torch.nn.functional.one_hot(q.argmax(-1), q.shape[-1]).bool()
    rest = q.masked_fill(top, 0).sum(-1, keepdim=True)
    changed = change(z.masked_fill(top, -math.inf)).softmax(-1) * rest
    return torch.where(top, q, changed).log()


def _uniform_tail(z: Tensor) -> Tensor:
    return _tail(z, lambda rest: torch.where(rest.isinf(), rest, 0))


RANGES = ("uneven", "spread")
NONE = ("calibrated", "too little data")
FAULTS: dict[str, tuple[Task, Simulation, tuple[str, ...]]] = {
    "logits times 1.6": ("binary", _binary(lambda z: 1.6 * z), ("over-confidence",)),
    "logits times 0.6": ("binary", _binary(lambda z: 0.6 * z), ("under-confidence",)),
    "log-odds plus 0.6": ("binary", _binary(lambda z: z + 0.6), ("class bias",)),
    "rare class, log-odds plus 1": ("binary", _binary(lambda z: z + 1, -3), ("class bias",)),
    "10% random labels": ("binary", _noisy(0.1, 2), ("label noise",)),
    "5% flipped labels": ("binary", _noisy(0.05, 2, flipped=True), ("label noise",)),
    "one group of 10: log-odds plus 2": ("binary", _grouped(10, lambda z, k: z + 2 * (k == 3)), ("bad group",)),
    "one group of 6: logits times 2.5": ("binary", _grouped(6, lambda z, k: z * (1 + 1.5 * (k == 3))), ("bad group",)),
    "gaps of 10 groups": ("binary", _grouped(10, lambda z, k: z + 0.25 * (k - 4.5)), ("bad group",)),
    "half times 2, half times 0.5": ("binary", _half, RANGES),
    "sine: z + sin 2z": ("binary", _binary(lambda z: z + (2 * z).sin()), (*RANGES, "over-confidence")),
    "logits above 0.8 times 2": (
        "binary", _binary(lambda z: torch.where(z > 1.386, 2 * z, z)), (*RANGES, "over-confidence", "class bias"),
    ),
    "times 3, clipped at 1% and 99%": ("binary", _binary(lambda z: _clipped(3 * z)), ("over-confidence",)),
    "times 1.5, plus 0.6": ("binary", _binary(lambda z: 1.5 * z + 0.6), ("over-confidence", "class bias")),
    "noise in log-odds": ("binary", _noisy_logits, ("over-confidence",)),
    "reversed": ("binary", _binary(lambda z: -z), ("over-confidence",)),
    "constant prediction": ("binary", _constant, NONE),
    "rounded to 0.5%": ("binary", _binary(_rounded), NONE),
    "clipped at 1% and 99%": ("binary", _binary(_clipped), NONE),
    "logits times 1.5": ("multiclass", _multiclass(lambda z: 1.5 * z), ("over-confidence",)),
    "logits times 0.67": ("multiclass", _multiclass(lambda z: 0.67 * z), ("under-confidence",)),
    "logit of class 3 plus 1": ("multiclass", _multiclass(lambda z: z + (torch.arange(10) == 3)), ("class bias",)),
    "10% random labels, 10 classes": ("multiclass", _noisy(0.1, 10), ("label noise",)),
    "times 3 where class 3 is predicted": (
        "multiclass",
        _multiclass(lambda z: torch.where((z.argmax(-1) == 3)[:, None], 3 * z, z)),
        ("bad class",),
    ),
    "30% of predicted class 0 are class 2": ("multiclass", _confused, ("confusion", "bad class")),
    "two classes swapped below the top": ("multiclass", _multiclass(_swapped, 5), ("swapped classes",)),
    "2nd and 3rd class swapped": ("multiclass", _multiclass(_ranks_swapped, 5), ("other classes",)),
    "two classes swapped": (
        "multiclass", _multiclass(lambda z: z[:, [0, 1, 2, 4, 3]], 5), ("swapped classes",),
    ),
    "rest of the mass uniform": ("multiclass", _multiclass(_uniform_tail, 5), NONE),
    "rest uniform, similar classes": ("multiclass", _uniform_tail_of_similar, ("confusion",)),
    "rest of the mass sharpened": (
        "multiclass", _multiclass(lambda z: _tail(z, lambda rest: 2 * rest), 5), ("other classes",),
    ),
    "one group of 6: times 2.5, 5 classes": (
        "multiclass", _grouped(6, lambda z, k: z * (1 + 1.5 * (k == 3)), 5), ("bad group",),
    ),
    "5 labels times 1.6": ("multilabel", _multilabel(lambda z: 1.6 * z), ("over-confidence",)),
    "one of 5 labels times 2.5": (
        "multilabel", _multilabel(lambda z: z * (1 + 1.5 * (torch.arange(5) == 3))), ("bad label",),
    ),
    "one of 5 labels plus 1": (
        "multilabel", _multilabel(lambda z: z + (torch.arange(5) == 3)), ("bad label", "class bias"),
    ),
}  # fmt: skip
"""Faults: task, simulation, and the decisions that are right."""

CALIBRATED: dict[str, tuple[Task, Simulation]] = {
    "binary": ("binary", _binary(lambda z: z)),
    "binary, rare (4%)": ("binary", _binary(lambda z: z, -5)),
    "binary, 8 groups": ("binary", _grouped(8, lambda z, _: z)),
    "5 classes": ("multiclass", _multiclass(lambda z: z, 5)),
    "5 labels": ("multilabel", _multilabel(lambda z: z)),
}


def cell(task: Task, simulate: Simulation, right: tuple[str, ...], n: int, sets: int) -> tuple[float, str]:
    """Return the fraction of right decisions, and the most frequent wrong one."""
    kinds: Counter[str] = Counter()
    for seed in range(sets):
        kinds[decided(task, simulate(torch.Generator().manual_seed(seed), n)).kind] += 1
    wrong = [(kind, k) for kind, k in kinds.most_common() if kind not in right]
    return sum(kinds[kind] for kind in right) / sets, f"{wrong[0][0]} {wrong[0][1] / sets:.1%}" if wrong else ""


def _error(n: int) -> float:
    """Return the standard error of a frequency of `LEVEL` in n data sets, in percent."""
    return 100 * math.sqrt(LEVEL * (1 - LEVEL) / n)


def calibrated_section(sets: int) -> list[str]:
    """Return the table of wrong alarms."""

    def n_sets(task: Task, n: int) -> int:
        """Return a fifth of the data sets where a data set takes much time."""
        return sets if n <= 1000 or (task != "multilabel" and n <= 5000) else sets // 5

    lines = [
        "## Calibrated models",
        "",
        f'Percentage of calibrated data sets with a verdict other than "calibrated" or "too little data". The stated '
        f"level is {LEVEL:.0%}. There are {sets:,} data sets, and {sets // 5:,} for 20,000 samples and for 5,000 "
        f"samples of several labels. The standard error at this level is {_error(sets):.1f}% and "
        f"{_error(sets // 5):.1f}%.",
        "",
        f"| model | {' | '.join(f'{n:,} samples' for n in NULL_SIZES)} |",
        f"|---|{'---:|' * len(NULL_SIZES)}",
    ]
    for name, (task, simulate) in CALIBRATED.items():
        alarms = [1 - cell(task, simulate, NONE, n, n_sets(task, n))[0] for n in NULL_SIZES]
        lines.append(f"| {name} | {' | '.join(f'{alarm:.1%}' for alarm in alarms)} |")
        print(lines[-1], flush=True)
    return lines


def faults_section(sets: int) -> list[str]:
    """Return the table of right decisions."""
    lines = [
        "## Faults",
        "",
        f"Percentage of {sets} data sets with a right decision (standard error at most {50 / math.sqrt(sets):.1f}%), "
        f"and the most frequent wrong one for {SIZES[-1]:,} samples. Some changes need no verdict: harmless rounding "
        "and clipping; a constant prediction, which is calibrated, but not better than the class frequencies, as the "
        "verdict states; and a uniform rest of the mass of exchangeable classes. The latter model knows less, but "
        "remains calibrated: E[y | q] = q. No test that only uses predictions and labels can detect it.",
        "",
        f"| task | fault | right | {' | '.join(f'{n:,}' for n in SIZES)} | most frequent wrong decision |",
        f"|---|---|---|{'---:|' * len(SIZES)}---|",
    ]
    for name, (task, simulate, right) in FAULTS.items():
        found = [cell(task, simulate, right, n, sets) for n in SIZES]
        shares = " | ".join(f"{share:.0%}" for share, _ in found)
        lines.append(f"| {task} | {name} | {', '.join(right)} | {shares} | {found[-1][1]} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=40, help="data sets for each fault and size (default 40)")
    parser.add_argument("--null-sets", type=int, default=1000, help="calibrated data sets for each cell (default 1000)")
    parser.add_argument("--only", choices=("calibrated", "faults"), help="keep the other table of the file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(__file__).resolve().parent / "results" / "diagnosis.md"
    head = (
        "# Decisions on simulated data\n\n"
        f"Decisions of reports without intervals and gains, with {N_REPLICATES} replicates for the p-value of ECE. "
        "Logits and log-odds are normal with standard deviation 2, and there are 10 classes unless stated. Computed by "
        "`python -m benchmarks.diagnosis`.\n\n"
    )
    stored = f"## {path.read_text().partition('## ')[2]}".partition("\n## Faults")
    tables = stored[0].strip(), "".join(stored[1:]).strip()
    calibrated = tables[0] if given.only == "faults" else "\n".join(calibrated_section(given.null_sets))
    faults = tables[1] if given.only == "calibrated" else "\n".join(faults_section(given.sets))
    path.write_text(f"{head}{calibrated}\n\n{faults}\n")


if __name__ == "__main__":
    main()

"""Frequency of right diagnoses in simulations: `python -m benchmarks.diagnosis` writes results/diagnosis.md."""

import argparse
import math
from collections import Counter
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import torchcalib as tc
from torchcalib.calibration import recommendation
from torchcalib.reporting import assembling
from torchcalib.reporting.calibration import DIAGNOSED
from torchcalib.reporting.diagnosis import Evidence, evidence_of

SIZES = (300, 2000, 10_000)
N_CLASSES = 10
BAD_CLASS, BAD_GROUP = 3, 3

# Faults and the diagnoses that are right, by task.
FAULTS = {
    "binary": {
        "logits times 1.6": ("over-confidence",),
        "logits times 0.6": ("under-confidence",),
        "log-odds plus 0.6": ("class bias",),
        "10% random labels": ("label noise",),
        "one group of 10: logits plus 2": ("bad group",),
        "none": ("calibrated", "too little data"),
    },
    "multiclass": {
        "logits times 1.5": ("over-confidence",),
        "logits times 0.67": ("under-confidence",),
        "logit of class 3 plus 1": ("class bias",),
        "10% random labels": ("label noise",),
        "logits times 3 where class 3 is predicted": ("bad class",),
        "none": ("calibrated", "too little data"),
    },
}


def simulated(task: str, fault: str, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return logits with a fault, labels, and groups or None."""
    generator = torch.Generator().manual_seed(seed)
    size = (n,) if task == "binary" else (n, N_CLASSES)
    logits = 2 * torch.randn(size, generator=generator, dtype=torch.float64)
    groups = torch.randint(10, (n,), generator=generator) if "group" in fault else None
    if task == "binary":
        labels = torch.bernoulli(logits.sigmoid(), generator=generator).long()
    else:
        labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    if "random" in fault:
        drawn = torch.randint(2 if task == "binary" else N_CLASSES, (n,), generator=generator)
        labels = torch.where(torch.rand(n, generator=generator) < 0.1, drawn, labels)
    factor = float(fault.split("times ")[1].split()[0]) if "times" in fault else 1.0
    shift = float(fault.split("plus ")[1]) if "plus" in fault else 0.0
    if "predicted" in fault:
        return torch.where((logits.argmax(-1) == BAD_CLASS)[:, None], factor * logits, logits), labels, None
    if groups is not None:
        return torch.where(groups == BAD_GROUP, logits + shift, logits), labels, groups
    if task == "multiclass" and shift:
        logits[:, BAD_CLASS] += shift
        return logits, labels, None
    return factor * logits + shift, labels, None


def cell(task: str, fault: str, n: int, sets: int) -> tuple[float, float, str]:
    """Return the effect in standard errors, the frequency of right diagnoses, and the most frequent wrong one."""
    right = FAULTS[task][fault]
    kinds: Counter[str] = Counter()
    statistics = []
    found: list[Evidence] = []

    def recorded(*arguments: object) -> Evidence:
        found.append(evidence_of(*arguments))  # type: ignore[arg-type]
        return found[-1]

    assembling.evidence_of = recorded  # type: ignore[assignment]  # the report does not store its evidence
    all_calibrators = recommendation.CALIBRATORS
    recommendation.CALIBRATORS = DIAGNOSED  # other calibrators do not change the diagnosis
    try:
        for seed in range(sets):
            logits, labels, groups = simulated(task, fault, n, seed)
            report = tc.report(logits, labels, task=task, from_logits=True, with_intervals=False, groups=groups)
            kinds[report.diagnosis.kind] += 1
            if "bad group" in right:
                in_group = groups == BAD_GROUP
                gap = (labels - logits.sigmoid())[in_group]
                statistics.append(
                    float(gap.sum().abs() / (logits.sigmoid() * (1 - logits.sigmoid()))[in_group].sum().sqrt())
                )
            else:
                statistics += [
                    math.sqrt(max(0, c.statistic - c.n_parameters)) for c in found[-1].candidates if c.kind in right
                ]
    finally:
        assembling.evidence_of = evidence_of  # type: ignore[assignment]
        recommendation.CALIBRATORS = all_calibrators
    wrong = [(kind, k) for kind, k in kinds.most_common() if kind not in right]
    shown = f"{wrong[0][0]} {wrong[0][1] / sets:.0%}" if wrong else ""
    return (median(statistics) if statistics else 0.0), sum(kinds[kind] for kind in right) / sets, shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=200, help="data sets for each cell (default 200)")
    sets = parser.parse_args().sets
    lines = [
        "# Diagnoses of simulated faults",
        "",
        f"Fraction of correct diagnoses in {sets} data sets (standard error at most {0.5 / math.sqrt(sets):.1%}). "
        "Effect: median square root of the likelihood-ratio statistic of the true cause minus its number of "
        "parameters, in standard errors (bad group: gap of its frequency in standard errors). Logits are normal with "
        "standard deviation 2; 10 classes for multi-class. Computed by `python -m benchmarks.diagnosis`.",
        "",
        "| task | fault | samples | effect | correct | most frequent wrong diagnosis |",
        "|---|---|---:|---:|---:|---|",
    ]
    for task, faults in FAULTS.items():
        for fault in faults:
            for n in SIZES:
                effect, right, wrong = cell(task, fault, n, sets)
                shown = "" if fault == "none" else f"{effect:.1f}"
                lines.append(f"| {task} | {fault} | {n:,} | {shown} | {right:.0%} | {wrong} |")
                print(lines[-1], flush=True)
    path = Path(__file__).resolve().parent / "results" / "diagnosis.md"
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

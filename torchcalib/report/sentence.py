"""What the numbers of a report say, in one plain sentence."""

import math
from collections.abc import Mapping

from torchcalib.bins import BinTable
from torchcalib.predictions import Task


def sentence_of(task: Task, values: Mapping[str, float], table: BinTable, samples_per_weight: float) -> str:
    """What the numbers say, in one plain sentence."""
    ece = float((table.share * table.gap.abs()).sum())
    expected, spread = _ece_by_chance(table, samples_per_weight)
    claimed, came_true = float(table.mean("confidence")), float(table.mean("frequency"))
    claim = {
        "binary": f"it gives P(y=1) = {claimed:.1%} on average and y = 1 in {came_true:.1%} of samples",
        "multiclass": f"it claims to be right with {claimed:.1%} on average and is right in {came_true:.1%} of samples",
        "multilabel": f"it gives its labels {claimed:.1%} on average and {came_true:.1%} of them hold",
    }[task]
    if ece <= expected + 2 * spread:
        verdict = "As far as this sample can tell the probabilities can be trusted"
    else:
        degree = "slightly" if ece < 0.02 else "clearly" if ece < 0.1 else "badly"
        if abs(came_true - claimed) < ece / 2:
            direction = "off, too high in some ranges and too low in others"
        elif task == "multiclass":
            direction = "over-confident" if claimed > came_true else "under-confident"
        else:
            direction = "too high" if claimed > came_true else "too low"
        verdict = f"The {'model is' if task == 'multiclass' else 'probabilities are'} {degree} {direction}"
    nce = values["nce"]
    if math.isfinite(nce):
        worth = f"; its NLL is {nce:.0%} of what always predicting the class shares gets"
    else:  # a single class in the data, or a probability of 0 for something that happened
        worth = "; its NLL is infinite, for it gave probability 0 to something that happened" * math.isinf(
            values["nll"]
        )
    return (
        f"{verdict}: {claim}, with frequency and probability {ece:.4f} apart (ECE; chance alone would show about "
        f"{expected:.4f}){worth}."
    )


def _ece_by_chance(table: BinTable, samples_per_weight: float) -> tuple[float, float]:
    """Mean and standard deviation of the ECE that a calibrated model of this size would show.

    A bin's gap is then about normal with variance c (1 - c) / n, and bins are independent; |gap| has sqrt(2 / pi) of
    that deviation as its mean and 1 - 2 / pi of that variance. With weights n is Kish's effective number of samples.
    """
    n = table.n * samples_per_weight
    deviation = (table.share * (table.confidence * (1 - table.confidence) / n).sqrt()).nan_to_num()
    spread = (1 - 2 / math.pi) * float(deviation.square().sum())
    return math.sqrt(2 / math.pi) * float(deviation.sum()), math.sqrt(spread)

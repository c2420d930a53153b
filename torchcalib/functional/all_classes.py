"""Full-ECE: calibration error of the probabilities of all classes in common bins."""

from typing import Unpack

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_average
from torchcalib.core.event_sums import AllClassBins
from torchcalib.core.events import NamedMode
from torchcalib.core.inputs import input_format_of
from torchcalib.core.ranked_bins import Binning
from torchcalib.core.sums import BinStats
from torchcalib.functional.estimator import Declaration, Estimator, metric_function

_AXES: dict[Task, NamedMode] = {"binary": "positive", "multiclass": "top_label", "multilabel": "classwise"}


def full_ece_from_bins(b: BinStats) -> Tensor:
    """Compute the Full-ECE `(...)` from sums over the events of all classes; see `full_ece`."""
    _, confidence, outcome = b.sums[..., :3, :].unbind(-2)
    return (outcome - confidence).abs().sum(-1) / outcome.sum(-1)  # each sample has one true class


@metric_function(
    Declaration(
        name="FullECE",
        question="mean gap of the probabilities of all classes",
        source="Liu et al., Full-ECE, arXiv 2406.11345",
        unit="probability",
        perfect=0.0,
        value_range=(0.0, 2.0),
        norm="l1",
        noise_increases=True,
    )
)
def full_ece(
    task: Task | None = None,
    *,
    n_bins: int = 15,
    average: Average | None = "macro",
    right: bool = False,
    **options: Unpack[InputOptions],
) -> Estimator[BinStats]:
    """Full-ECE: calibration error over bins of the probabilities of all classes.

    Full-ECE = (1 / N) sum_b n_b |gap_b|. The events of a bin are all pairs of a sample and a class whose probability is
    in the bin: n_b is their number, and gap_b the fraction of pairs with the true class minus the mean probability. N
    is the number of samples, so that the weights of the bins have the sum C. The token-level error of language models
    includes the probabilities of unlikely tokens, which have no influence on the top label.

    The classes of a binary task are y=0 and y=1. Each label of a multi-label task is a binary problem.

    Returns:
        `(...)`, or `(..., L)` for multi-label with `average=None`, in [0, 2], in the dtype of `preds` (at least
        float32). NaN without data.

    Gradient:
        With respect to the probabilities, for constant bins; 0 for a bin with gap 0.

    Reference:
        Liu et al.: Full-ECE: A Metric For Token-level Calibration on Large Language Models (2024), arXiv 2406.11345.

    Example:
        >>> import torch
        >>> preds = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]])
        >>> full_ece(preds, torch.tensor([0, 1]), n_bins=2)
        tensor(0.3000)
    """
    binning = Binning("equal_width", n_bins, right)
    input_format = input_format_of(task, options)
    read_as = input_format.read_as
    averages = check_average(average, read_as == "multilabel")
    accumulator = AllClassBins(_AXES[read_as], binning.n_bins, binning.right)
    return Estimator(input_format, accumulator, full_ece_from_bins, averages)

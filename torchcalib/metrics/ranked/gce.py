"""Generalised calibration error: a loss of one's own in every bin, and a norm over the bins."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack, get_args

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_choice, task_read_as
from torchcalib.core.events import Reduction
from torchcalib.core.ranked_bins import Binning, Bins, Norm, norm_over_bins
from torchcalib.core.sums import BinStats
from torchcalib.metrics.binned.reading import BinnedMetric, BinReading, evaluate
from torchcalib.ops.isotonic import Ties, Variant


def gce_from_bins(b: BinStats, loss: Callable[[BinStats], Tensor], norm: Norm) -> Tensor:
    """Generalised calibration error: the norm over bins of a loss of each; raise unless it gives one for each."""

    def checked(bins: BinStats) -> Tensor:
        value = loss(bins)
        if not isinstance(value, Tensor) or value.shape != bins.n.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"`loss` must return a tensor with a loss for each bin, shape {tuple(bins.n.shape)}, got {found}. "
                "Do not sum over bins: `norm` does."
            )
        return value

    return norm_over_bins(checked, b, norm)


def gce(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    loss: Callable[[BinStats], Tensor],
    bins: Bins | Sequence[float] | Tensor = "equal_width",
    norm: Norm = "l1",
    n_bins: int = 15,
    n_min: int | None = None,
    n_max: int | None = None,
    variant: Variant = "code",
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    right: bool = False,
    ties: Ties = "pool",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Generalised calibration error: a loss of one's own in every bin, and a norm over the bins.

    ECE is `loss=lambda b: b.gap.abs()` over equal-width bins, ACE the same over equal-mass bins, MCE with `norm="max"`.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels; soft targets too, unless the bins are isotonic.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        loss: from bins to a loss each, `(..., B)`. It is given what every bin holds: `n`, `share`, `confidence`,
            `frequency`, `gap`, all `(..., B)`. An empty bin does not count, whatever its loss.
        bins: see `tce`.
        norm: `"l1"`: sum share loss; `"l2"`: sqrt(sum share loss^2); `"max"`: the greatest.
        n_bins: see `tce`.
        n_min: see `tce`.
        n_max: see `tce`.
        variant: see `tce`.
        reduction: what the confidence is of; see `ece`.
        average: `"macro"` averages class-wise and multi-label values over classes; None returns `(..., C)`.
        right: see `tce`.
        ties: see `tce`.
        **options: see `torchcalib.InputOptions`. `weights` must be whole numbers.

    Returns:
        What the loss is measured in, `(...)`, or `(..., C)` for classes that are not averaged, in the dtype of `preds`
        (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, as far as the loss has one; the bin a sample falls in is a constant.

    Source:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), Definition 1.

    Example:
        >>> import torch
        >>> p, y = torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 1])
        >>> gce(p, y, task="binary", loss=lambda b: b.gap.abs(), bins="equal_mass", n_bins=2)
        tensor(0.1500)
    """
    _check_loss(loss)
    check_choice("norm", norm, get_args(Norm))
    binning = Binning.given(bins, n_bins=n_bins, right=right, n_min=n_min, n_max=n_max, variant=variant, ties=ties)
    reading = BinReading(task_read_as(task, options), binning, reduction, average, from_sample=True)
    return evaluate(partial(gce_from_bins, loss=loss, norm=norm), reading, task, preds, target, options)


def _check_loss(loss: object) -> None:
    if not callable(loss):
        raise TypeError(f"`loss` must be a function from bins to a loss each, got {loss!r}. Try lambda b: b.gap.abs().")


class GCE(BinnedMetric):
    """Generalised calibration error, streamed; see `gce`. A `loss` that is a lambda does not pickle."""

    from_sample = True
    unit = "of the loss"
    plot_lower_bound = None
    plot_upper_bound = None
    question = "how large is a loss of one's own over the bins"
    source = "Matsubara et al., TCE, UAI 2023, Definition 1"

    def __init__(
        self,
        *,
        loss: Callable[[BinStats], Tensor],
        bins: Bins | Sequence[float] | Tensor = "equal_width",
        norm: Norm = "l1",
        n_bins: int = 15,
        n_min: int | None = None,
        n_max: int | None = None,
        variant: Variant = "code",
        right: bool = False,
        ties: Ties = "pool",
        **options: Any,
    ) -> None:
        _check_loss(loss)
        check_choice("norm", norm, get_args(Norm))
        super().__init__(
            Binning.given(bins, n_bins=n_bins, right=right, n_min=n_min, n_max=n_max, variant=variant, ties=ties),
            partial(gce_from_bins, loss=loss, norm=norm),
            **options,
        )

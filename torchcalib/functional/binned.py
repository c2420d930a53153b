"""Binned calibration errors and the calibration curve.

Expected (ECE), adaptive (ACE), expected signed (ESCE), maximum (MCE) and root mean squared (RMSCE) calibration error,
and the error of all classes in common bins (Full-ECE).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_average, check_flag
from torchcalib.core.event_sums import AllClassBins, EqualWidthBins
from torchcalib.core.events import Mode, NamedMode
from torchcalib.core.inputs import input_format_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked_bins import Binning, Bins, RankedBins, Ties
from torchcalib.core.sums import BinStats
from torchcalib.core.tasks import infers_task
from torchcalib.functional.estimator import Declaration, Estimator, metric_function, of_arrays
from torchcalib.io.errors import shown
from torchcalib.ops.bin_sums import Norm as GapNorm
from torchcalib.ops.bin_sums import bin_errors, has_error_kernel
from torchcalib.ops.logs import root
from torchcalib.ops.segments import equal_width_edges

if TYPE_CHECKING:  # modules of samples, tables and calibration tests, which values over equal-width bins do not need
    from torchcalib.core.bins import BinTable
    from torchcalib.core.images import Images
    from torchcalib.core.ranked import RankedSample
    from torchcalib.inference.intervals import IntervalKind
    from torchcalib.inference.simulation import LabelRows
    from torchcalib.inference.testing import CalibrationTest, ErrorTest

Formula = Callable[..., Tensor]
_DEBIASED: dict[str, GapNorm] = {"l1": "debiased_l1", "l2": "debiased_l2"}


@dataclass(frozen=True, eq=False)
class BinnedEstimator(Estimator["BinStats | RankedSample"]):
    """Estimator of a calibration error over bins, with `binning` as the rule that assigns samples to bins."""

    binning: Binning
    debiased: bool = False  # whether the formula requires `BinStats.gap_variance`
    depends_on_samples: bool = False  # whether the value depends on the samples in each bin, not only on their sums
    is_signed: bool = False  # whether the value is a mean that may be negative
    interval: "IntervalKind | None" = None  # formula of the interval of the test; None for no interval
    test_formula: Callable[[BinStats], Tensor] | None = None  # the statistic of the test, if it is not the value

    def values(
        self, statistic: "BinStats | RankedSample", formula: Callable[[BinStats], Tensor] | None = None
    ) -> Tensor:
        """Return the error `(...)` per batch element and per class or label. `formula` replaces `self.formula`."""
        from_bins = formula or self.formula
        if isinstance(statistic, BinStats):
            is_tensor = isinstance(statistic.sums, Tensor)  # on the CPU, a function may have a numpy array
            return error_of_bins(from_bins, statistic) if is_tensor else from_bins(statistic)
        from torchcalib.core.ranked import by_pieces

        return by_pieces(lambda sample: from_bins(self.binning.from_sample(sample)), statistic)

    def table(self, statistic: "BinStats | RankedSample") -> "BinTable":
        """Return the table of bins for accumulated sums or samples."""
        if not isinstance(statistic, BinStats):
            return self.ranked_bins(statistic).table()
        from torchcalib.core.bins import BinTable

        return BinTable.from_bins(statistic, equal_width_edges(self.binning.n_bins, statistic.n))

    def ranked_bins(self, sample: "RankedSample") -> RankedBins:
        """Return the bins of a sample with their entropic calibration difference (ECD).

        The ECD of several classes does not follow from the top label. A stream does not store it.
        """
        if sample.ecd is None and self._has_event_ecd:
            sample = sample.with_event_ecd()
        return self.binning.from_sample(sample)

    def error_test(self) -> "ErrorTest":
        """Return the definition of the calibration test, for `run_error_tests`."""
        from torchcalib.inference.testing import ErrorTest

        of_test = None if self.test_formula is None else partial(self.values, formula=self.test_formula)
        return ErrorTest(self.values, of_test, signed=self.is_signed, interval=self.interval)

    def label_rows(self, p: Predictions) -> "list[LabelRows] | None":
        """Return the rows of predictions, to simulate whole labels for an average over exclusive classes; else None."""
        is_average = self.averages and p.task == "multiclass"
        bins = self.accumulator
        return equal_width_rows(p, bins) if is_average and isinstance(bins, EqualWidthBins) else None

    def test_from(
        self, statistic: "BinStats | RankedSample", *, rows: "Sequence[LabelRows] | None" = None, **how: Any
    ) -> "CalibrationTest":
        """Compute the calibration test from sums or samples with extra batch axes; see `label_rows` for `rows`."""
        from torchcalib.inference.simulation import LabelRows
        from torchcalib.inference.testing import run_error_test

        cancels = self.input_format.read_as == "multiclass"
        invalid = None
        if not isinstance(statistic, BinStats):
            invalid = statistic.has_invalid_rows
            if self.averages and cancels:
                rows = LabelRows.from_sample(statistic)
            if not (self.binning.is_isotonic or self.depends_on_samples):
                statistic = self.binning.from_sample(statistic).with_noise()
        found = run_error_test(self.error_test(), statistic, rows=rows, average=self.averages, cancels=cancels, **how)
        if invalid is None:
            return found
        return found.masked(invalid.any(-1) if self.averages else invalid)

    @property
    def _has_event_ecd(self) -> bool:
        """Whether the ECD follows from the confidences and outcomes of the events."""
        accumulator: Any = self.accumulator
        return self.input_format.read_as != "multiclass" or accumulator.mode == "classwise"

    def with_ecd(self) -> Self:
        """Return a copy whose statistic contains the ECD."""
        accumulator: Any = self.accumulator
        return replace(self, accumulator=replace(accumulator, with_ecd=True))

    def streamed(self, num_classes: int | None, *, resolution: int | None = None, with_ecd: bool = False) -> Self:
        """Return a copy of this estimator for a streaming metric; see `torchcalib.metrics.errors.BinnedMetric`."""
        check_flag("with_ecd", with_ecd)
        made = super().streamed(num_classes, resolution=resolution)
        if not isinstance(made.accumulator, EqualWidthBins):
            if resolution is not None:
                cells: Any = made.accumulator
                made = replace(made, accumulator=replace(cells, with_squares=self.debiased))
            if with_ecd and not self._has_event_ecd:
                raise ValueError(
                    "`with_ecd` must be False for the top label of several classes, got True. Use bins of equal width."
                )
            return made
        if resolution is not None:
            raise ValueError(
                f"`resolution` must be None for bins='equal_width', got {shown(resolution)}. "
                "Omit it: the size of the state is constant."
            )
        return replace(made, accumulator=replace(made.accumulator, with_ecd=with_ecd, with_noise=True))


def binned(
    formula: Callable[..., Tensor],
    binning: Binning,
    task: Task | None,
    mode: Mode | None,
    average: Average | None,
    options: Mapping[str, Any],
    *,
    debiased: bool = False,
    from_sample: bool = False,
    hard_targets: bool = False,
    per_image: "bool | Images" = False,
    **test: Any,
) -> BinnedEstimator:
    """Return the estimator of a calibration error over bins; see `Estimator.of_events`.

    `formula` maps sums over bins to values `(...)`. `debiased` is its option to use the variance of gaps.
    `from_sample` stores samples even for equal-width bins, because the formula requires more than sums. `hard_targets`
    rejects soft targets, because the formula counts labels. `test` contains the fields of `BinnedEstimator` that define
    its calibration test.
    """
    is_additive = binning.bins == "equal_width" and not from_sample
    accumulator: Callable[[Mode], Any]
    if is_additive:
        accumulator = partial(EqualWidthBins, n_bins=binning.n_bins, right=binning.right, with_noise=debiased)
    else:
        from torchcalib.core.ranked import ExactSample

        accumulator = ExactSample
    if debiased:
        formula = norm_of_gaps(_DEBIASED[vars(formula)["norm"]])(partial(formula, debiased=True))
    estimator = BinnedEstimator.of_events(
        accumulator,
        formula,
        task,
        mode,
        average,
        options,
        binning,
        debiased,
        per_image=per_image,
        hard_targets=hard_targets or binning.is_isotonic,
        whole_weights=not is_additive,
    )
    return replace(estimator, **test) if test else estimator


error_over_bins = partial(
    Declaration,
    unit="probability",
    perfect=0.0,
    value_range=(0.0, 1.0),
    noise_increases=True,
    stream_options=("with_ecd", "resolution"),
    has_test=True,
    diagram="torchcalib.plots.reliability:reliability_diagram",
    diagram_of_classes="torchcalib.plots.classwise:classwise_reliability_diagrams",
)
"""Function that creates the declaration of a calibration error over bins."""


def equal_width_rows(p: Predictions, accumulator: EqualWidthBins) -> "list[LabelRows] | None":
    """Return the rows of multi-class predictions, for class-wise equal-width bins; None for soft targets."""
    from torchcalib.core.ranked import RankedSample
    from torchcalib.inference.simulation import LabelRows

    events = accumulator.events(p)
    absent = None if events.weights is None else ~(events.weights > 0)
    score = events.confidence if absent is None else events.confidence.masked_fill(absent, torch.nan)
    n = None if events.weights is None or not p.weighted else events.weights.expand(score.shape)
    outcome = events.outcome if n is None else events.outcome * n
    return LabelRows.from_sample(RankedSample(score, outcome, n, False), copies=p.copies, cell=accumulator.cell)


def error_of_bins(formula: Callable[[BinStats], Tensor], b: BinStats) -> Tensor:
    """Return the formula of bins. On a GPU, one launch computes a norm of gaps and its gradient; see `norm_of_gaps`."""
    norm = getattr(formula, "norm", None)
    if norm is not None and type(b) is BinStats and has_error_kernel(b.sums):
        return bin_errors(b.sums, norm, lambda sums: formula(replace(b, sums=sums)))
    return formula(b)


def norm_of_gaps(norm: GapNorm) -> Callable[[Formula], Formula]:
    """Name the norm of the gaps of bins that a formula computes, for `error_of_bins`."""

    def decorate(formula: Formula) -> Formula:
        vars(formula)["norm"] = norm
        return formula

    return decorate


@norm_of_gaps("l1")
@of_arrays
def ece_from_bins(b: BinStats, debiased: bool = False) -> Tensor:
    """Compute the expected calibration error `(...)` from sums over bins; see `ece`."""
    if debiased:
        return (b.share * root((b.gap.square() - b.gap_variance).clamp(min=0))).sum(-1)
    return abs(b.weighted_gap).sum(-1)


@metric_function(
    error_over_bins(
        name="ECE",
        question="mean distance between frequency and confidence in equal-width bins",
        source="Naeini et al., Bayesian Binning, AAAI 2015, sec. 2, doi 10.1609/aaai.v29i1.9602",
        norm="l1",
    )
)
def ece(
    task: Task | None = None,
    *,
    n_bins: int = 15,
    debiased: bool = False,
    mode: Mode | None = None,
    average: Average | None = "macro",
    right: bool = False,
    per_image: "bool | Images" = False,
    **options: Unpack[InputOptions],
) -> BinnedEstimator:
    """Expected calibration error (ECE): the weighted mean of |frequency - confidence| over equal-width bins.

    ECE = sum_b share_b |gap_b|, where share_b is the fraction of the samples in bin b. gap_b is the frequency of the
    event minus the mean confidence in bin b.

    ECE depends on the number of bins. On a finite sample it is positive even for a calibrated model. Compare it with
    the noise floor, its expected value for a calibrated model (`torchcalib.inference.calibration_test`).

    Args:
        debiased: Replace |gap_b| by sqrt(max(0, gap_b^2 - v)) for the estimated variance v of gap_b; see `rmsce`. The
            result estimates the ECE of infinitely many samples over the same bins. Some bias remains for few samples;
            see `benchmarks.debiased`.

    Returns:
        A difference of probabilities in [0, 1], `(...)`, or `(..., C)` with `average=None`, in the dtype of `preds`
        (at least float32). NaN without data.

    Gradient:
        With respect to the confidences, for constant bins; finite everywhere.

    Reference:
        Naeini, Cooper, Hauskrecht: Obtaining Well Calibrated Probabilities Using Bayesian Binning (AAAI 2015), sec. 2;
        Broecker: Estimating reliability and resolution of probability forecasts through decomposition of the empirical
        score (Climate Dynamics, 2012); Ferro, Fricker: A bias-corrected decomposition of the Brier score (Quarterly
        Journal of the Royal Meteorological Society, 2012), for the debiased squared gap.

    Example:
        >>> import torch
        >>> ece(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    check_flag("debiased", debiased)
    binning = Binning("equal_width", n_bins, right)
    if not debiased:
        return binned(ece_from_bins, binning, task, mode, average, options, per_image=per_image, interval="absolute")
    # The bias of the debiased value depends on the miscalibration, so that it has no valid interval.
    return binned(
        ece_from_bins,
        binning,
        task,
        mode,
        average,
        options,
        per_image=per_image,
        debiased=True,
        test_formula=ece_from_bins,
    )


@metric_function(
    error_over_bins(
        name="ACE",
        question="mean distance between frequency and confidence in equal-mass bins",
        source="Matsubara et al., TCE, UAI 2023, sec. 2, arXiv 2306.14343",
        norm="l1",
    )
)
def ace(
    task: Task | None = None,
    *,
    n_bins: int = 15,
    mode: Mode | None = None,
    average: Average | None = "macro",
    ties: Ties = "pool",
    **options: Unpack[InputOptions],
) -> BinnedEstimator:
    """Adaptive calibration error (ACE): expected calibration error over bins with equal numbers of samples.

    ACE = sum_b share_b |gap_b|. Here share_b is the fraction of samples in bin b, and gap_b the frequency of the event
    minus the mean confidence in bin b. The N samples are sorted by confidence, and bin i starts at position
    `i * N // n_bins`. `weights` must be integers: the number of copies of each sample.

    Args:
        ties: `"pool"` assigns all samples with equal confidence to the bin of the first one. The value then does not
            depend on the order of the samples. Bins may have unequal sizes or be empty. `"split"` assigns samples with
            equal confidence in the given order, as the published code does.

    Returns:
        A difference of probabilities in [0, 1], `(...)`, or `(..., C)` with `average=None`, in the dtype of `preds`
        (at least float32). NaN without data.

    Gradient:
        With respect to the confidences, for constant bins; finite everywhere.

    Reference:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), sec. 2. The
        adaptive error in Nixon et al., Measuring Calibration in Deep Learning, is class-wise: `mode="classwise"`.

    Example:
        >>> import torch
        >>> ace(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 1]), task="binary", n_bins=2)
        tensor(0.1500)
    """
    binning = Binning("equal_mass", n_bins, ties=ties)
    return binned(ece_from_bins, binning, task, mode, average, options, interval="absolute")


@norm_of_gaps("signed")
@of_arrays
def esce_from_bins(b: BinStats) -> Tensor:
    """Compute the expected signed calibration error `(...)` from sums over bins; see `esce`."""
    return b.weighted_gap.sum(-1)


@metric_function(
    error_over_bins(
        name="ESCE",
        question="mean frequency minus mean confidence",
        source="Sumler et al., An Entropic Metric, arXiv 2502.14545, sec. II",
        value_range=(-1.0, 1.0),
        better="nearer to 0",
        norm="mean",
        noise_increases=False,
    )
)
def esce(
    task: Task | None = None,
    *,
    n_bins: int = 15,
    mode: Mode | None = None,
    average: Average | None = "macro",
    right: bool = False,
    per_image: "bool | Images" = False,
    **options: Unpack[InputOptions],
) -> BinnedEstimator:
    """Expected signed calibration error (ESCE): mean outcome minus mean confidence.

    ESCE = sum_b share_b gap_b, with share_b and gap_b as in `ece`. It equals mean(outcome) - mean(confidence) for any
    bins. For the top label, a positive value indicates under-confidence, a negative value over-confidence. For
    confidences below 0.5 the meaning of the sign is reversed.

    Returns:
        A difference of probabilities in [-1, 1], `(...)`, or `(..., C)` with `average=None`, in the dtype of `preds`
        (at least float32). NaN without data.

    Gradient:
        Defined everywhere.

    Reference:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, sec. II.

    Example:
        >>> import torch
        >>> esce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.0667)
    """
    binning = Binning("equal_width", n_bins, right)
    return binned(
        esce_from_bins, binning, task, mode, average, options, per_image=per_image, is_signed=True, interval="mean_gap"
    )


@norm_of_gaps("mean")
def mean_bin_error_from_bins(b: BinStats) -> Tensor:
    """Compute the mean |gap| of the non-empty bins `(...)` from sums over bins; see `mean_bin_error`."""
    return b.gap.abs().sum(-1) / (b.n > 0).sum(-1)


@metric_function(
    error_over_bins(
        name="mean bin error",
        question="mean distance between frequency and confidence, with equal weight for each non-empty bin",
        source="Barfoot et al., Average Calibration Losses, 2025, arXiv 2506.03942",
        norm="l1",
    )
)
def mean_bin_error(
    task: Task | None = None,
    *,
    n_bins: int = 15,
    mode: Mode | None = None,
    average: Average | None = "macro",
    right: bool = False,
    per_image: "bool | Images" = False,
    **options: Unpack[InputOptions],
) -> BinnedEstimator:
    """Mean bin error: the mean of |frequency - confidence| over non-empty equal-width bins, without weights.

    (1 / B') sum_b |gap_b| for the B' non-empty bins. gap_b is the frequency of the event minus the mean confidence in
    bin b. In segmentations, the bins near 0 and 1 have almost all voxels, and determine `ece`. Here each bin has the
    same weight. Bins with few voxels have noisy frequencies, and can determine the value.

    MONAI and netcal call this the average calibration error (ACE). `ace` is another quantity, with adaptive bins.

    Returns:
        A difference of probabilities in [0, 1], `(...)`, or `(..., C)` with `average=None`, in the dtype of `preds`
        (at least float32). NaN without data.

    Gradient:
        With respect to the confidences, for constant bins; finite everywhere.

    Reference:
        Neumann, Zisserman, Vedaldi: Relaxed Softmax: Efficient Confidence Auto-Calibration for Safe Pedestrian
        Detection (NIPS 2018 workshop MLITS); Barfoot et al.: Average Calibration Losses for Reliable
        Uncertainty in Medical Image Segmentation (2025), arXiv 2506.03942.

    Example:
        >>> import torch
        >>> mean_bin_error(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 0]), task="binary", n_bins=5)
        tensor(0.4667)
    """
    binning = Binning("equal_width", n_bins, right)
    return binned(mean_bin_error_from_bins, binning, task, mode, average, options, per_image=per_image)


@norm_of_gaps("max")
def mce_from_bins(b: BinStats) -> Tensor:
    """Compute the maximum calibration error `(...)` from sums over bins; see `mce`."""
    return b.gap.abs().amax(-1)


@metric_function(
    error_over_bins(
        name="MCE",
        question="largest distance between frequency and confidence in a bin",
        source="Naeini et al., Bayesian Binning, AAAI 2015, sec. 2, doi 10.1609/aaai.v29i1.9602",
        norm="max",
    )
)
def mce(
    task: Task | None = None,
    *,
    bins: Bins | Sequence[float] | Tensor = "equal_width",
    n_bins: int = 15,
    mode: Mode | None = None,
    average: Average | None = "macro",
    right: bool = False,
    per_image: "bool | Images" = False,
    **options: Unpack[InputOptions],
) -> BinnedEstimator:
    """Maximum calibration error (MCE): the largest |frequency - confidence| over non-empty bins.

    MCE = max_b |gap_b|, where gap_b is the frequency of the event minus the mean confidence in bin b. Bins are not
    weighted by their number of samples, so MCE tends to be large for small samples.

    Returns:
        A difference of probabilities in [0, 1], `(...)`, or `(..., C)` with `average=None`, in the dtype of `preds`
        (at least float32). NaN without data.

    Gradient:
        With respect to the confidences in the bin with the largest |gap|; finite. Tied bins share it equally.

    Reference:
        Naeini, Cooper, Hauskrecht: Obtaining Well Calibrated Probabilities Using Bayesian Binning (AAAI 2015), sec. 2.

    Example:
        >>> import torch
        >>> mce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    binning = Binning.from_bins(bins, n_bins=n_bins, right=right)
    return binned(mce_from_bins, binning, task, mode, average, options, per_image=per_image)


@norm_of_gaps("l2")
def rmsce_from_bins(b: BinStats, debiased: bool = False) -> Tensor:
    """Compute the root mean squared calibration error `(...)` from sums over bins; see `rmsce`."""
    square = b.gap.square() - b.gap_variance if debiased else b.gap.square()
    return root((b.share * square).sum(-1).clamp(min=0))


@metric_function(
    error_over_bins(
        name="RMSCE",
        question="root mean squared distance between frequency and confidence",
        source="Kumar et al., Verified Uncertainty Calibration, NeurIPS 2019, sec. 2, arXiv 1909.10155",
        norm="l2",
    )
)
def rmsce(
    task: Task | None = None,
    *,
    bins: Bins | Sequence[float] | Tensor = "equal_width",
    n_bins: int = 15,
    debiased: bool = False,
    mode: Mode | None = None,
    average: Average | None = "macro",
    right: bool = False,
    per_image: "bool | Images" = False,
    **options: Unpack[InputOptions],
) -> BinnedEstimator:
    """Root mean squared calibration error (RMSCE) over bins.

    RMSCE = sqrt(sum_b share_b gap_b^2). Here share_b is the fraction of samples in bin b, and gap_b the frequency of
    the event minus the mean confidence in bin b. Large gaps have more weight than in `ece`. The value is biased
    upwards, because the frequency in each bin is noisy.

    Args:
        debiased: Subtract the estimated variance of the gap, S2 sum w (e - m)^2 / (W (W^2 - S2)), from each squared
            gap. Here e = target - confidence are the residuals of a bin, m is their mean with weights w, W = sum w and
            S2 = sum w^2. For unweighted rows it is the sample variance of e, divided by the number of rows. Integer
            weights count copies, for which S2 = W. Bins with one row are not corrected. The sum is clamped at 0.

    Returns:
        A difference of probabilities in [0, 1], `(...)`, or `(..., C)` with `average=None`, in the dtype of `preds`
        (at least float32). NaN without data.

    Gradient:
        With respect to the confidences, finite everywhere; 0 where the value is 0.

    Reference:
        Kumar, Liang, Ma: Verified Uncertainty Calibration (NeurIPS 2019), sec. 2 and 4 (debiased).

    Example:
        >>> import torch
        >>> rmsce(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        tensor(0.2000)
    """
    check_flag("debiased", debiased)
    binning = Binning.from_bins(bins, n_bins=n_bins, right=right)
    if not debiased:
        return binned(
            rmsce_from_bins, binning, task, mode, average, options, per_image=per_image, interval="root_mean_square"
        )
    # The test uses the biased value: the debiased one is clamped to 0 for about half of all calibrated models.
    test: dict[str, Any] = {"interval": "debiased", "test_formula": rmsce_from_bins}
    return binned(rmsce_from_bins, binning, task, mode, average, options, per_image=per_image, debiased=True, **test)


@infers_task
def calibration_curve(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    bins: Bins | Sequence[float] | Tensor = "equal_width",
    n_bins: int = 15,
    mode: Mode | None = None,
    right: bool = False,
    **options: Unpack[InputOptions],
) -> "BinTable":
    """Compute the calibration curve: a table of the frequency of the event and the mean confidence in each bin.

    The other columns are bin edges, number of samples, fraction of all samples (`share`) and gap (frequency -
    confidence). The table also contains the mean entropic calibration difference (ECD) and a consistency band. If the
    model is calibrated, the band contains the frequency in a given bin with at least 95% probability.

    ECD per bin separates calibrated from uncertain predictions. Near 1 / C, for C classes, ECD is near 0 for any
    outcomes. In bins of other probabilities, ECD near 0 requires outcomes that agree with them.

    Returns:
        A `BinTable` with columns `(..., B)`, class-wise and multi-label `(..., C, B)`, in float64.

    Reference:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, Tables I-II.

    Example:
        >>> import torch
        >>> table = calibration_curve(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        >>> print(table.to_dict()["gap"].round(4), table.to_dict()["ecd"].round(4))
        [-0.2  0.2] [-0.2773 -0.237 ]
        >>> preds, target = torch.full((100,), 0.8), torch.tensor([0, 1, 1, 1]).repeat(25)
        >>> table = calibration_curve(preds, target, task="binary", n_bins=2)
        >>> print(table)
        bin       count  share  mean confidence  frequency  if calibrated, 95%      gap  mean ECD (nats)
        0 to 0.5      0     0%
        0.5 to 1    100   100%           0.8000     0.7500    0.7200 to 0.8800  -0.0500          +0.0693
    """
    estimator = binned(ece_from_bins, Binning.from_bins(bins, n_bins=n_bins, right=right), task, mode, "macro", options)
    estimator = estimator.with_ecd()
    if isinstance(estimator.accumulator, EqualWidthBins):
        estimator = replace(estimator, accumulator=replace(estimator.accumulator, with_noise=True))
    return estimator.table(estimator.statistic(preds, target, options.get("weights")))


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

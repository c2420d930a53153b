"""Proper scores: NLL, Brier and ECD, as means over samples.

A score is data (`Score`): what one sample gets, and what always predicting the class priors gets. One engine reads
every score; the functions and the streaming classes differ only in which score they name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchcalib.distributions import ecd_of_distribution, mean_over_samples
from torchcalib.kernels.row_stats import safe_log, xmul
from torchcalib.predictions import (
    Average,
    InputFormat,
    InputOptions,
    Predictions,
    Task,
    check_average,
    count_of_outputs,
    read_priors,
)
from torchcalib.reductions import top_label
from torchcalib.statistics import ScoreRecipe, ScoreSum
from torchcalib.streaming import StreamingMetric

Normalize = Literal["prior", "classes"]


class Score(NamedTuple):
    """A per-sample score, and its mean for one who always predicts the class priors."""

    per_sample: Callable[..., Tensor]
    of_prior: Callable[[ScoreSum, Tensor, Task], Tensor]
    normalizations: tuple[Normalize, ...] = ()
    arguments: tuple[float | None, ...] = ()

    def recipe(self, by_class: bool) -> ScoreRecipe:
        """The sums that this score is read from."""
        return ScoreRecipe(self.per_sample, self.arguments, by_class)


def _nll(p: Predictions, eps: float | None = None) -> Tensor:
    return p.cross_entropy if eps is None else p.clipped_cross_entropy(eps)


def _brier(p: Predictions) -> Tensor:
    return p.squared_error


def _ecd(p: Predictions) -> Tensor:
    return p.neg_entropy + p.cross_entropy


def _hit(p: Predictions) -> Tensor:
    return top_label(p).outcome


def _entropy(_: ScoreSum, priors: Tensor, __: Task) -> Tensor:
    return 0 - xmul(priors, safe_log(priors)).sum(-1)  # not -x, which makes -0 of the entropy of a single class


def _brier_of_prior(s: ScoreSum, priors: Tensor, task: Task) -> Tensor:
    """E sum_k (P_k - t_k)^2, which is 1 - sum P^2 for hard labels; half of it where one class stands for two."""
    both = s.label_square.sum(-1) / s.total - priors.square().sum(-1)
    return both if task == "multiclass" else both / 2


def _zero(s: ScoreSum, _: Tensor, __: Task) -> Tensor:
    return torch.zeros_like(s.total)


def _largest(_: ScoreSum, priors: Tensor, __: Task) -> Tensor:
    return priors.amax(-1)


def _nll_score(eps: float | None = None) -> Score:
    if eps is not None and not 0 < eps < 1:
        raise ValueError(f"`eps` must be in (0, 1) or None, got {eps!r}.")
    return Score(_nll, _entropy, ("prior",), (eps,))


_BRIER = Score(_brier, _brier_of_prior, ("prior", "classes"))
_ECD = Score(_ecd, _zero)
ACCURACY = Score(_hit, _largest)
"""How often the most probable class is the true one (for soft targets its share of votes)."""


@dataclass(frozen=True)
class ScoreReading:
    """From sums of a score to its value: the mean, over samples or with the classes at given priors, normalised.

    The only place where the options of a reading are checked.
    """

    score: Score
    task: Task
    normalize: Normalize | None = None
    priors: Tensor | Sequence[float] | None = None
    average: Average | None = "macro"

    def __post_init__(self) -> None:
        if self.normalize not in (None, *self.score.normalizations):
            offered = ", ".join(map(repr, self.score.normalizations))
            raise ValueError(f"`normalize` must be None{' or ' * bool(offered)}{offered}, got {self.normalize!r}.")
        if self.priors is not None and self.task != "multiclass":
            read_priors(self.priors, 2)
        check_average(self.average, self.task == "multilabel")

    @property
    def by_class(self) -> bool:
        """Whether the sums must keep classes apart."""
        return self.normalize is not None or self.priors is not None

    def read(self, s: ScoreSum) -> Tensor:
        """Read the value, `(...)`, or `(..., L)` for labels that are not averaged."""
        value = s.score.sum(-1) / s.total
        if self.priors is not None:
            value = xmul(self._class_priors(s), s.score / s.n).sum(-1)
        if self.normalize == "prior":
            value = value / self.score.of_prior(s, self._class_priors(s), self.task)
        elif self.normalize == "classes" and self.task == "multiclass":
            value = value / s.n.shape[-1]
        return self._averaged(value)

    def of_prior(self, s: ScoreSum) -> Tensor:
        """Read what always predicting the class priors would get; `s` must keep classes apart."""
        return self._averaged(self.score.of_prior(s, self._class_priors(s), self.task))

    def _class_priors(self, s: ScoreSum) -> Tensor:
        return s.share if self.priors is None else read_priors(self.priors, s.n.shape[-1]).to(s.sums)

    def _averaged(self, value: Tensor) -> Tensor:
        return value.mean(-1) if self.task == "multilabel" and self.average else value


def _evaluate(
    score: Score,
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    normalize: Normalize | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    weights: Tensor | None = None,
    **options: Any,
) -> Tensor:
    reading = ScoreReading(score, task, normalize, priors, average)
    p = InputFormat(task, hard_targets=priors is not None, **options).read(preds, target, weights)
    return reading.read(score.recipe(reading.by_class).of(p)).to(p.dtype)


def _per_sample(
    score: Score,
    preds: Tensor,
    target: Tensor,
    task: Task,
    weights: Tensor | None = None,
    **options: Any,
) -> Tensor:
    p = InputFormat(task, **options).read(preds, target, weights)
    scores = score.per_sample(p, *score.arguments)
    if p.weights is not None:
        scores = scores.masked_fill((p.weights == 0) | p.weights.isnan(), torch.nan)
    return scores.transpose(-1, -2) if task == "multilabel" else scores


def nll(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    eps: float | None = None,
    normalize: Literal["prior"] | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Negative log-likelihood (log loss, cross entropy): the mean of -log q_h, in nats.

    q_h is the probability given to the true class h; with soft targets the score is -sum_k t_k log q_k. From logits it
    comes from `log_softmax`, so a saturated prediction is exact. q_h = 0 gives +inf unless `eps` is given.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels: binary `(..., N)`, multi-class `(..., N)`, multi-label `(..., N, L)`; or soft targets, floating,
            binary and multi-label of the same shape, multi-class `(..., N, C)`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        eps: probabilities below it count as `eps`.
        normalize: `"prior"` divides by the NLL of always predicting the class priors, their entropy (NCE): 1 is what
            that naive predictor gets. A single class in the data has entropy 0, and the result is inf or NaN.
        priors: class priors `(C,)` (binary and each label: `(2,)`) that the score is reported for, whatever the class
            shares in the data; a class with a positive prior but no samples gives NaN. Integer targets only.
        average: multi-label: `"macro"` is the mean over labels, None returns `(..., L)`.
        **options: see `torchcalib.InputOptions`.

    Returns:
        `(...)` in [0, inf], in the dtype of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        Everywhere; 0 for a sample whose score is infinite.

    Source:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), eq. 8; NCE sec. 2.2; priors app. A, eq. 36-37.

    Example:
        >>> nll(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.2284)
        >>> nll(torch.tensor([[200.0, 0.0]]), torch.tensor([1]), task="multiclass", from_logits=True)
        tensor(200.)
    """
    return _evaluate(
        _nll_score(eps),
        preds,
        target,
        task=task,
        normalize=normalize,
        priors=priors,
        average=average,
        **options,
    )


def nll_per_sample(
    preds: Tensor, target: Tensor, *, task: Task, eps: float | None = None, **options: Unpack[InputOptions]
) -> Tensor:
    """-log q_h of every sample, in nats; see `nll`.

    Returns:
        `(..., N)`, multi-label `(..., N, L)`. Weights are not multiplied in; rows that `ignore_index` or weight 0 leave
        out are NaN.

    Example:
        >>> nll_per_sample(torch.tensor([1.0, 0.5]), torch.tensor([1, 0]), task="binary")
        tensor([0.0000, 0.6931])
    """
    return _per_sample(_nll_score(eps), preds, target, task, **options)


def brier_score(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    normalize: Normalize | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Brier score: the mean squared distance between the prediction and what happened.

    Binary and per label (p - y)^2, in [0, 1]; multi-class sum_k (q_k - 1[h=k])^2, in [0, 2]: the two-class form is
    twice the binary one. Soft targets take the place of the indicator.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets, as for `nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        normalize: `"classes"` divides the multi-class sum by C; `"prior"` divides by the same score of always
            predicting the class priors (NBS): 1 is what that naive predictor gets. None rescales nothing.
        priors: class priors that the score is reported for, as for `nll`.
        average: multi-label: `"macro"` is the mean over labels, None returns `(..., L)`.
        **options: see `torchcalib.InputOptions`.

    Returns:
        `(...)`, in the dtype of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        Everywhere.

    Source:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration, eq. 2 (binary); [EPSR] eq. 9 (multi-class).

    Example:
        >>> brier_score(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.0467)
    """
    return _evaluate(_BRIER, preds, target, task=task, normalize=normalize, priors=priors, average=average, **options)


def brier_per_sample(preds: Tensor, target: Tensor, *, task: Task, **options: Unpack[InputOptions]) -> Tensor:
    """Squared distance of every sample; see `brier_score`.

    Returns:
        `(..., N)`, multi-label `(..., N, L)`. Weights are not multiplied in; rows left out are NaN.

    Example:
        >>> brier_per_sample(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]), task="multiclass")
        tensor([0.5000, 2.0000])
    """
    return _per_sample(_BRIER, preds, target, task, **options)


def ecd(
    preds: Tensor | Distribution,
    target: Tensor,
    *,
    task: Task | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Entropic calibration difference: how surprising outcomes are beyond what the prediction expects, in nats.

    The mean of -log q_h minus the prediction's own entropy: sum_k q_k log q_k - log q_h, with 0 log 0 = 0. Binary it is
    (p - y) log(p / (1-p)). 0 is what a calibrated model gets on average; negative means under-confident, positive
    over-confident. p = 1 and right gives 0, p = 1 and wrong +inf. One binary datum is bounded below by
    -W(1/e) = -0.2785, one of C classes by less (-1.1010 for 10). The total does not depend on any binning.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`; or a
            `torch.distributions` object with batch shape `(..., N)`, for which the score is -log_prob(x) - entropy.
        target: labels or soft targets, as for `nll`; or the observed values of the distribution.
        task: `"binary"`, `"multiclass"` or `"multilabel"`; None for a distribution.
        priors: class priors that the score is reported for, as for `nll`.
        average: multi-label: `"macro"` is the mean over labels, None returns `(..., L)`.
        **options: see `torchcalib.InputOptions`; for a distribution only `weights`.

    Returns:
        `(...)` in (-inf, inf], in the dtype of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        Everywhere; 0 for a sample whose score is infinite.

    Source:
        [ECD] Sumler, Devlin, Maskell, Lane: An Entropic Metric for Measuring Calibration of Machine Learning Models,
        eq. 8 (distributions), 12 (multi-class), 15 (binary).

    Example:
        >>> ecd(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(-0.2504)
        >>> ecd(torch.distributions.Normal(torch.zeros(2), 1.0), torch.tensor([0.0, 3.0]))
        tensor(1.7500)
    """
    if isinstance(preds, Distribution):
        if task is not None or priors is not None or average != "macro" or options.keys() - {"weights"}:
            raise ValueError(
                "`task`, `priors`, `average` and input options but `weights` must be left out for a torch "
                f"Distribution, got task={task!r} and {sorted(options)}. It says itself how values are read."
            )
        return mean_over_samples(ecd_of_distribution(preds, target), options.get("weights"))
    return _evaluate(_ECD, preds, target, task=_required(task), priors=priors, average=average, **options)


def ecd_per_sample(
    preds: Tensor | Distribution,
    target: Tensor,
    *,
    task: Task | None = None,
    **options: Unpack[InputOptions],
) -> Tensor:
    """Entropic calibration difference of every sample, in nats; see `ecd`.

    Returns:
        `(..., N)`, multi-label `(..., N, L)`. Weights are not multiplied in; rows left out are NaN.

    Example:
        >>> ecd_per_sample(torch.tensor([1.0, 1.0, 0.5]), torch.tensor([1, 0, 1]), task="binary")
        tensor([0., inf, 0.])
    """
    if isinstance(preds, Distribution):
        return ecd_of_distribution(preds, target)
    return _per_sample(_ECD, preds, target, _required(task), **options)


def _required(task: Task | None) -> Task:
    if task is None:
        raise TypeError("`task` must be 'binary', 'multiclass' or 'multilabel' for a tensor, got None. Pass task=...")
    return task


class ScoreMetric(StreamingMetric[ScoreSum]):
    """Mean of a per-sample score over a stream.

    The state is 3 sums; where `normalize` or `priors` keep the classes apart, 3 for each class.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        num_classes: C of a multi-class task; needed with `normalize` or `priors`, else only checked.
        num_labels: L of a multi-label task.
        from_logits, ignore_index, class_axis, validate_args: see `torchcalib.InputOptions`.
        normalize, priors, average: see the function of the same name.
        batch_shape: leading axes to keep apart, one value each; all other axes but the class axis are samples.
        **kwargs: those of `torchmetrics.Metric`.
    """

    score: ClassVar[Score]

    def __init__(
        self,
        *,
        task: Task,
        num_classes: int | None = None,
        num_labels: int | None = None,
        from_logits: bool = False,
        normalize: Normalize | None = None,
        priors: Tensor | Sequence[float] | None = None,
        average: Average | None = "macro",
        ignore_index: int | None = None,
        class_axis: int = -1,
        batch_shape: tuple[int, ...] = (),
        validate_args: bool = True,
        **kwargs: Any,
    ) -> None:
        reading = ScoreReading(self.score, task, normalize, priors, average)
        super().__init__(
            InputFormat(
                task,
                from_logits=from_logits,
                ignore_index=ignore_index,
                class_axis=class_axis,
                num_classes=count_of_outputs(task, num_classes, num_labels),
                validate_args=validate_args,
                hard_targets=priors is not None,
            ),
            self.score.recipe(reading.by_class),
            batch_shape,
            **kwargs,
        )
        self.reading = reading

    def _value(self, statistic: ScoreSum) -> Tensor:
        return self.reading.read(statistic)


class NLL(ScoreMetric):
    """Negative log-likelihood in nats, streamed; see `nll`. `eps`: probabilities below it count as `eps`.

    Example:
        >>> metric = NLL(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.2284, dtype=torch.float64)
    """

    score = _nll_score()
    unit, perfect, plot_lower_bound = "nats", 0.0, 0.0
    question = "how improbable was what happened"
    source = "Ferrer & Ramos, Evaluating Posterior Probabilities, eq. 8"

    def __init__(self, *, eps: float | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.recipe = _nll_score(eps).recipe(self.reading.by_class)


class Brier(ScoreMetric):
    """Brier score, streamed; see `brier_score`.

    Example:
        >>> metric = Brier(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.0467, dtype=torch.float64)
    """

    score = _BRIER
    unit, perfect, plot_lower_bound = "squared probability", 0.0, 0.0
    question = "how far were the probabilities from what happened"
    source = "Sumler et al., An Entropic Metric, eq. 2; Ferrer & Ramos, Evaluating Posterior Probabilities, eq. 9"


class ECD(ScoreMetric):
    """Entropic calibration difference in nats, streamed; see `ecd`.

    Example:
        >>> metric = ECD(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(-0.2504, dtype=torch.float64)
    """

    score = _ECD
    higher_is_better = None  # 0 is calibrated; below is under-confident, above over-confident
    unit, perfect = "nats", 0.0
    question = "were the outcomes more surprising than the predictions expected (+) or less (-)"
    source = "Sumler et al., An Entropic Metric, eq. 12, 15"

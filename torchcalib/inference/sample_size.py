"""Number of rows that a calibration test needs, and the smallest error that it detects.

Rows have confidences c of an event with the probability q. A shift or a temperature makes q differ from c. Bin k has
the share s_k of the rows, and the mean gap d_k = E[q - c]. Let v_k be the variance of an outcome minus its confidence:

    v_k = E[c (1 - c)] for a calibrated model, and E[q (1 - q) + (q - c)^2] - d_k^2 for this one.

With n rows, the gap of a bin is nearly normal with variance v_k / (n s_k). A test rejects if its error exceeds the
quantile of a calibrated model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import check_choice, check_count, check_positive, is_number
from torchcalib.core.arrays import as_tensor
from torchcalib.io.errors import shown
from torchcalib.ops.bisection import bisect, bisect_each
from torchcalib.special.beta import betainc

Fault = Literal["shift", "temperature"]
Test = Literal["esce", "ece", "rmsce"]

LEVEL, POWER = 0.05, 0.8
"""Default level of a test, and probability with which it detects an error."""

_N_BINS = 15
_N_QUANTILES = 2**12  # confidences of a beta distribution
_MOST_ROWS = 2**15  # largest number of rows of predictions that are used
_N_REPLICATES = 2**16  # simulated gaps of ECE and RMSCE
_UNIFORM = 0.29  # standard deviation of a uniform distribution
_LARGEST = 40.0  # largest shift of log-odds, and largest logarithm of a temperature
_MOST = 1e12  # largest number of rows
_N_BISECTIONS = 32


def required_n(
    error: float,
    *,
    power: float = POWER,
    level: float = LEVEL,
    fault: Fault = "shift",
    test: Test | None = None,
    preds: Any = None,
    from_logits: bool = False,
    prevalence: float = 0.5,
    spread: float | None = None,
    n_tests: int = 1,
    design_effect: float = 1.0,
    systems: int = 1,
) -> int:
    """Return the number of rows with which a calibration test detects an error.

    The confidences are those of `preds`, such as predictions of an earlier evaluation. Without predictions, they have a
    beta distribution with the mean `prevalence` and the standard deviation `spread`.

    With `systems=2`, the mean scores of two systems on the same rows are compared. `error` is then the difference of
    the mean scores, and `spread` the standard deviation of the differences in single rows.

    Args:
        error: Error to detect, the mean of |q - c| for true probabilities q and confidences c. It is positive for
            probabilities above the confidences (shift), and for an under-confident model (temperature). Otherwise it
            is negative. With `systems=2`, difference of the mean scores.
        power: Probability with which the error is detected.
        level: Level of the test: probability with which a calibrated model is rejected.
        fault: `"shift"` adds a constant to all log-odds, as a changed frequency of the event does. `"temperature"`
            multiplies log-odds, or the logits of multi-class predictions, by a factor.
        test: `"esce"` (mean signed error), `"ece"` or `"rmsce"` over 15 equal-width bins. None uses the one that needs
            the fewest rows.
        preds: Confidences of an event `(N,)`, for example P(y = 1), or P(y = k) of a class or label. For multi-class
            probabilities `(N, C)`, the event is that the predicted class is right.
        from_logits: Whether `preds` are logits.
        prevalence: Mean confidence, without `preds`.
        spread: Standard deviation of the confidences, without `preds`; None is that of a uniform distribution, 0.29.
        n_tests: Number of tests, such as classes, labels or groups, that share the level (Bonferroni).
        design_effect: Variance of the mean signed error, divided by that of independent rows. The notes of a report
            with clusters state it. For clusters of m rows with a correlation r of their residuals, it is 1 + (m - 1) r.
        systems: 2 to compare the mean scores of two systems on the same rows.

    Returns:
        The number of rows; with `systems=2` of each system.

    Raises:
        TypeError, ValueError: For invalid arguments, or if the confidences allow no error of this size.

    Reference:
        Chow, Shao, Wang: Sample size calculations in clinical research (2nd ed. 2008), sec. 4.1, for a mean; Kish:
        Survey Sampling (1965), ch. 5.4, for the design effect.

    Example:
        >>> required_n(0.02)
        3255
        >>> required_n(0.01, prevalence=0.1, spread=0.1, n_tests=10)
        10842
        >>> round(required_n(0.02, fault="temperature"), -2)
        6300
    """
    if not is_number(error) or not 0 < abs(error) < math.inf:
        raise ValueError(f"`error` must be a number other than 0, got {shown(error)}. An error of 2% is 0.02.")
    level = _level_of_one(power, level, n_tests, design_effect, systems)
    if systems == 2:
        return math.ceil(design_effect * (_quantiles(power, level) * _of_differences(spread, preds, test) / error) ** 2)
    plan = _Plan(_rows(preds, from_logits, prevalence, spread), fault, level)
    strength = plan.strength(error)
    n = min(plan.n(each, strength, power) for each in _tests(test))
    return math.ceil(design_effect * n)


def minimum_detectable_error(
    n: int | None = None,
    *,
    power: float = POWER,
    level: float = LEVEL,
    fault: Fault = "shift",
    test: Test | None = None,
    preds: Any = None,
    from_logits: bool = False,
    prevalence: float = 0.5,
    spread: float | None = None,
    n_tests: int = 1,
    design_effect: float = 1.0,
    systems: int = 1,
) -> float:
    """Return the smallest error that a calibration test with n rows detects: the inverse of `required_n`.

    `Report.minimum_detectable_error` is the smallest shift that the rows of a report detect.

    Args:
        n: Number of rows; None is that of `preds`.
        power, level, fault, test, preds, from_logits: See `required_n`.
        prevalence, spread, n_tests, design_effect, systems: See `required_n`.

    Returns:
        The absolute error that is detected for both signs, or with `systems=2` the difference of the mean scores. NaN
        if not even the largest error of these confidences is detected.

    Raises:
        TypeError, ValueError: For invalid arguments.

    Example:
        >>> round(minimum_detectable_error(3270), 4)
        0.02
        >>> round(minimum_detectable_error(1000, spread=0.3, systems=2), 4)
        0.0266
    """
    if n is None and preds is None:
        raise TypeError("`n` must be given without `preds`, got None. Pass the number of rows.")
    level = _level_of_one(power, level, n_tests, design_effect, systems)
    if n is not None:
        check_count("n", n)
    if systems == 2:
        deviation = _of_differences(spread, preds, test)  # without `preds`, `n` is given
        return _quantiles(power, level) * deviation * math.sqrt(design_effect / (n or 1))
    n = len(preds) if n is None else n
    plan = _Plan(_rows(preds, from_logits, prevalence, spread), fault, level)
    errors = [min(plan.error(each, sign, n / design_effect, power) for each in _tests(test)) for sign in (-1.0, 1.0)]
    return max(errors) if max(errors) < math.inf else math.nan


def detectable_gap(spread: float, n_tests: int = 1) -> float:
    """Return the absolute signed error that is detected with probability 0.8, from its standard deviation `spread`.

    A shifted model is assumed to have the variance of a calibrated one.
    """
    return _quantiles(POWER, LEVEL / n_tests) * spread


def _level_of_one(power: float, level: float, n_tests: int, design_effect: float, systems: int) -> float:
    """Check arguments, and return the level of one test."""
    for name, value in {"power": power, "level": level}.items():
        if not is_number(value) or not 0 < value < 1:
            raise ValueError(f"`{name}` must be between 0 and 1, got {shown(value)}. 80% is 0.8.")
    if power <= level:
        raise ValueError(f"`power` must be above `level`, {level:g}, got {power:g}. Pass a power such as 0.8.")
    check_count("n_tests", n_tests)
    check_count("systems", systems, at_most=2)
    check_positive("design_effect", design_effect)
    return level / n_tests


def _quantiles(power: float, level: float) -> float:
    """Return the mean of a standardised statistic that is significant with this power, in a two-sided test."""
    return float(torch.special.ndtri(torch.tensor([1 - level / 2, power], dtype=torch.float64, device="cpu")).sum())


def _of_differences(spread: float | None, preds: Any, test: Test | None) -> float:
    """Return the standard deviation of the differences of two systems, after a check."""
    for name, value in {"preds": preds, "test": test}.items():
        if value is not None:
            raise ValueError(f"`{name}` must be None for two systems, got {shown(value)}. Pass `spread` instead.")
    if spread is None:
        raise TypeError(
            "`spread` must be given for two systems, got None. Pass the standard deviation of the differences of their "
            "scores in a row, such as (tc.nll(a, y, reduction='none') - tc.nll(b, y, reduction='none')).std()."
        )
    check_positive("spread", spread)
    return spread


def _tests(test: Test | None) -> tuple[Test, ...]:
    """Return the tests among which that with the fewest rows is used."""
    check_choice("test", test, (*get_args(Test), None))
    return get_args(Test) if test is None else (test,)


class _EventRows(NamedTuple):
    """Confidences of rows, as probabilities of the event among classes."""

    log_p: Tensor  # logarithms of probabilities, up to a constant of the row, float64 (N, C)
    event: Tensor  # class of the event (N, 1)

    def probability(self, scale: float = 1.0) -> Tensor:
        """Return the probability of the event `(N,)` after a multiplication of all logits."""
        return (scale * self.log_p).softmax(-1).gather(-1, self.event).squeeze(-1)


def _rows(preds: Any, from_logits: bool, prevalence: float, spread: float | None) -> _EventRows:
    """Return the confidences of predictions, or of a beta distribution."""
    if preds is None:
        confidences = _beta(prevalence, _UNIFORM if spread is None else spread)
        return _EventRows(torch.stack(((1 - confidences).log(), confidences.log()), -1), _ones(confidences))
    values = as_tensor("preds", preds).detach().cpu().double()
    if values.dim() not in (1, 2) or not len(values) or bool(values.isnan().any()):
        raise ValueError(
            f"`preds` must have shape (N,) or (N, C) and no NaN, got shape {tuple(values.shape)}. Pass the confidences "
            "of one event."
        )
    if not from_logits and not bool(((values >= 0) & (values <= 1)).all()):
        raise ValueError("`preds` must be in [0, 1], got values outside. Pass from_logits=True for logits.")
    values = values[:: math.ceil(len(values) / _MOST_ROWS)]
    if values.dim() == 1:
        other = torch.zeros_like(values) if from_logits else (1 - values).log()
        return _EventRows(torch.stack((other, values if from_logits else values.log()), -1), _ones(values))
    return _EventRows(values if from_logits else values.log(), values.argmax(-1, keepdim=True))


def _ones(values: Tensor) -> Tensor:
    return torch.ones(len(values), 1, dtype=torch.int64, device="cpu")


def _beta(mean: float, spread: float) -> Tensor:
    """Return quantiles of a beta distribution, in the middle of parts with equal probability."""
    for name, value in {"prevalence": mean, "spread": spread}.items():
        check_positive(name, value)
    if not mean < 1 or spread**2 >= mean * (1 - mean):
        raise ValueError(
            f"`prevalence` must be below 1, and `spread` below sqrt(prevalence * (1 - prevalence)), got {mean:g} and "
            f"{spread:g}. Pass the mean and the standard deviation of the confidences, or `preds`."
        )
    size = mean * (1 - mean) / spread**2 - 1
    chance = (torch.arange(_N_QUANTILES, dtype=torch.float64, device="cpu") + 0.5) / _N_QUANTILES
    a, b = torch.full_like(chance, size * mean), torch.full_like(chance, size * (1 - mean))
    ends = torch.zeros_like(chance), torch.ones_like(chance)
    return bisect_each(lambda x: betainc(a, b, x) < chance, *ends, _N_BISECTIONS)[1]


@dataclass(frozen=True, eq=False)
class _Plan:
    """Power of tests for the faults of a model with given confidences. `strength` is the size of the fault.

    It is the shift of the log-odds, or the logarithm of the factor of the logits.
    """

    rows: _EventRows
    fault: Fault
    level: float

    def __post_init__(self) -> None:
        check_choice("fault", self.fault, get_args(Fault))

    @cached_property
    def confidence(self) -> Tensor:
        """Confidences `(N,)`."""
        return self.rows.probability()

    @cached_property
    def share(self) -> Tensor:
        """Share of the rows in each bin `(K,)`."""
        return self._means(torch.ones_like(self.confidence)) * self._n / len(self._bin)

    def _means(self, values: Tensor) -> Tensor:
        """Return the mean of values `(N,)` in each bin `(K,)`; 0 in an empty bin."""
        sums = torch.bincount(self._bin, values, minlength=_N_BINS)
        return sums / self._n.clamp(min=1)

    @cached_property
    def _bin(self) -> Tensor:
        return (self.confidence * _N_BINS).long().clamp(max=_N_BINS - 1)

    @cached_property
    def _n(self) -> Tensor:
        return torch.bincount(self._bin, minlength=_N_BINS)

    def true(self, strength: float) -> Tensor:
        """Return the true probabilities `(N,)`."""
        if self.fault == "temperature":
            return self.rows.probability(math.exp(strength))
        return (self.confidence.logit() + strength).sigmoid()

    def size(self, strength: float) -> float:
        """Return the mean of |q - c|, with the sign of the strength."""
        return math.copysign(float((self.true(strength) - self.confidence).abs().mean()), strength)

    def strength(self, error: float) -> float:
        """Return the strength of a fault with this error."""
        largest = self.size(math.copysign(_LARGEST, error))
        if abs(error) >= abs(largest):
            raise ValueError(
                f"`error` must be below {abs(largest):.3g} in absolute value, which is the largest {self.fault} of "
                f"these confidences, got {error:g}. Pass a smaller error."
            )
        sign = math.copysign(1.0, error)
        return sign * bisect(lambda x: abs(self.size(sign * x)) < abs(error), 0.0, _LARGEST, _N_BISECTIONS)[1]

    def power(self, test: Test, strength: float, n: float) -> float:
        """Return the probability that a test with n rows is significant."""
        q, c = self.true(strength), self.confidence
        gap, square = self._means(q - c), self._means(q * (1 - q) + (q - c).square())
        calibrated = self._means(c * (1 - c))
        if test == "esce":  # normal, from the sums over all bins
            mean = float((self.share * gap).sum())
            spread = [math.sqrt(float((self.share * x).sum()) / n) for x in (calibrated, square)]
            spread[1] = math.sqrt(max(0.0, spread[1] ** 2 - mean**2 / n))
            tail = torch.tensor(1 - self.level / 2, dtype=torch.float64, device="cpu")
            critical = spread[0] * float(torch.special.ndtri(tail))
            ends = [(sign * mean - critical) / max(spread[1], 1e-300) for sign in (-1, 1)]
            return float(torch.special.ndtr(torch.tensor(ends, dtype=torch.float64, device="cpu")).sum())
        scale = (1 / self.share.clamp(min=1e-300)).sqrt()
        noise = self._noise * ((square - gap.square()).clamp(min=0).sqrt() * scale)
        return float((self._error(test, math.sqrt(n) * gap + noise) > self._critical[test]).double().mean())

    def _error(self, test: Test, gaps: Tensor) -> Tensor:
        """Return ECE or RMSCE of gaps `(R, K)`."""
        if test == "ece":
            return (self.share * gaps.abs()).sum(-1)
        return (self.share * gaps.square()).sum(-1).sqrt()

    @cached_property
    def _noise(self) -> Tensor:
        """Standard normal gaps of simulated bins `(R, K)`."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(_N_REPLICATES, _N_BINS, generator=generator, dtype=torch.float64, device="cpu")

    @cached_property
    def _critical(self) -> Mapping[Test, float]:
        """Quantile of the errors of a calibrated model, times the root of n."""
        c = self.confidence
        gaps = self._noise * (self._means(c * (1 - c)) / self.share.clamp(min=1e-300)).sqrt()
        tests: tuple[Test, ...] = ("ece", "rmsce")
        return {test: float(self._error(test, gaps).quantile(1 - self.level)) for test in tests}

    def n(self, test: Test, strength: float, power: float) -> float:
        """Return the number of rows with which a test has this power."""
        found = bisect(
            lambda log_n: self.power(test, strength, math.exp(log_n)) < power, 0.0, math.log(_MOST), _N_BISECTIONS
        )
        return math.exp(found[1])

    def error(self, test: Test, sign: float, n: float, power: float) -> float:
        """Return the smallest absolute error with this power, infinite if there is none."""
        if self.power(test, sign * _LARGEST, n) < power:
            return math.inf
        found = bisect(lambda x: self.power(test, sign * x, n) < power, 0.0, _LARGEST, _N_BISECTIONS)
        return abs(self.size(sign * found[1]))

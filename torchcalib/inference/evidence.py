"""A value, and what chance has to do with it."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from torch import Tensor

from torchcalib.inference.words import in_one_line


@dataclass(frozen=True, eq=False, repr=False)
class Evidence:
    """A calibration error with what a perfectly calibrated model would show, and whether it is one.

    Attributes:
        value: of the data themselves `(...)`.
        noise_floor: what the value would be on average, if the model were perfectly calibrated and had predicted the
            same `(...)`. Of a signed error it is that of the absolute value.
        p_value: the probability of an error at least as large if the model were perfectly calibrated, `(...)`. It is
            (1 + number of replicates with an error at least that of the data) / (R + 1). Ties count and are not broken
            at random: an error of exactly 0 has p = 1, and P(p <= a) <= a for a calibrated model. The p-value is
            uniform if ties are rare. With few samples ties are frequent, and a calibrated model is rejected less often
            than the level allows.
        low, high: interval of the error of the model, without noise, `(...)`. It contains 0 where the p-value is at
            least 1 - level. It may lie below a value that is mostly noise. For an error without a noise-free value
            (TCE) it is the interval of its expected value at this number of samples, which contains the noise floor
            instead of 0. NaN if it was not computed; see the metric.
        level: share of data sets like this one whose interval holds the error of the model.
    """

    value: Tensor
    noise_floor: Tensor
    p_value: Tensor
    low: Tensor
    high: Tensor
    level: float

    @classmethod
    def by_construction(cls, value: Tensor, level: float) -> Self:
        """Return that of an error which is 0 whatever the model: chance makes nothing of it."""
        nothing = 0 * value
        return cls(value, nothing, nothing + 1, nothing, nothing, level)

    def __getitem__(self, index: Any) -> Self:
        """Index the batch axes: `found[k]` is that of series, group or class k."""
        if self.value.dim() < 1:
            raise IndexError("evidence of one value has no batch axis to index")
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "level"}
        return replace(self, **{name: tensor[index] for name, tensor in tensors.items()})

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        """Say it in one line; a line for each, if there are several."""
        if self.value.dim():
            return "\n".join(f"[{index}] {self[index]}".replace("\n", "\n    ") for index in range(len(self.value)))
        value, floor, p, low, high = (
            float(x) for x in (self.value, self.noise_floor, self.p_value, self.low, self.high)
        )
        return in_one_line(value, floor, p, low, high, self.level)

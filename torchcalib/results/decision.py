"""`Decision`: verdict on the calibration of a model, its cause, and what to do."""

from dataclasses import dataclass
from typing import Literal

from torchcalib.results.lines import LineInterval

Safety = Literal["safe", "unsafe", "cannot be told", ""]

Kind = Literal[
    "calibrated",
    "too little data",
    "one class",
    "clusters",
    "over-confidence",
    "under-confidence",
    "spread",
    "class bias",
    "label noise",
    "bad class",
    "bad label",
    "bad group",
    "other classes",
    "swapped classes",
    "confusion",
    "uneven",
    "impossible outcomes",
]


@dataclass(frozen=True)
class Decision:
    """Verdict on the calibration of a model, its cause, and what to do.

    All texts of a report on these questions are fields of its decision.

    Attributes:
        kind: cause: `"over-confidence"`, `"under-confidence"`, `"spread"` (a temperature, without a significant mean
            gap of this sign), `"class bias"`, `"label noise"`, `"bad class"`, `"bad label"`, `"bad group"`,
            `"other classes"` (their probabilities if they are not the top label), `"swapped classes"`, `"confusion"`
            (one label where another class is predicted), `"uneven"` (other errors in some ranges, or only a
            significant gain of a calibrator), or `"impossible outcomes"` (outcomes with predicted probability 0, which
            reject calibration with certainty; the verdict also names another cause, if any). Without a significant
            cause: `"calibrated"`, `"too little data"`, `"one class"` (in the targets), or `"clusters"` (which determine
            the label).
        degree: `"slightly"`, `"clearly"` or `"badly"`, by the debiased root mean squared calibration error (RMSCE), for
            a bad group by that of the group. The limits are 0.02 and 0.1. If events are rarer than 2%, the ratio of
            their frequency to the mean prediction decides if it gives a higher degree: the limits are factors of 1.25
            and 2. `"badly"` and `"clearly"` need a 95% interval above the next lower limit (0.02, and 0 or a ratio of
            1), and `"slightly"` an interval below the limit of `"badly"`. Empty if the size is not known by this rule,
            and without a significant cause.
        verdict: the decision in few words, such as `"Clearly over-confident"`.
        cause: sentences on the cause, with the values that show it.
        size: the RMSCE that determines the degree, as a sentence; empty without a significant cause.
        action: sentences on what to do. If calibrators were evaluated, they contain `Recommendation.text`, except for a
            bad group or label without advice for a calibrator.
        calibrator: name of the calibrator to add; empty for none.
        gain: gain of the calibrator to add, or of the preferred one if none is worthwhile, in percent of `score`.
            None if calibrators were not evaluated.
        interval: 95% interval of `gain`; None if undefined.
        score: name of the score, `"NLL"` or `"Brier score"`.
        safety: `"safe"` if the 95% interval of the entropic calibration difference (ECD) is not above the threshold
            `safe_threshold`, `"unsafe"` if it is above it, and `"cannot be told"` if it contains the threshold or was
            omitted. An infinite ECD is `"unsafe"`. Empty without a threshold. `cause` contains a sentence on it.
    """

    kind: Kind
    degree: str
    verdict: str
    cause: str
    action: str
    size: str = ""
    calibrator: str = ""
    gain: float | None = None
    interval: LineInterval | None = None
    score: str = "NLL"
    safety: Safety = ""

    @property
    def is_fault(self) -> bool:
        """Whether the verdict is miscalibration."""
        return self.kind not in ("calibrated", "too little data", "one class", "clusters")

    @property
    def sentence(self) -> str:
        """Verdict and cause."""
        return f"{self.verdict}. {self.cause}"

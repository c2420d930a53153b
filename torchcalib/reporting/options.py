"""Options that reports, comparisons and their builders share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torchcalib.core.arguments import InputOptions, Task, check_count, check_flag, check_positive
from torchcalib.core.inputs import InputFormat, check_option_names, input_format_of
from torchcalib.core.ranked_bins import Binning
from torchcalib.core.tasks import check_name_count, checked_names
from torchcalib.io.errors import shown

MAX_BINS = 1000
"""Maximum number of bins, for legible diagrams and tables."""

# Options that comparisons do not have
ONLY_REPORTS = ("safe_threshold", "with_calibration", "with_intervals", "with_classes")
_ROLES = ("groups", "group_names", "clusters")  # further arguments of `torchcalib.report`, which errors suggest
_INPUT_SETTINGS = ("from_logits", "ignore_index", "positive_classes", "class_axis", "validate_args", "nan_policy")


class ReportOptionsDict(InputOptions, total=False):
    """Options of `torchcalib.report` as keyword arguments: those of `InputOptions`, except `batch_dims`, and these.

    - `class_names` (default None): names of the classes in the order of the class axis; the negative class first if
      binary.
    - `n_bins` (default 15): number of equal-width bins, and of equal-mass bins for the adaptive calibration error.
    - `right` (default False): use bins `(a, b]` instead of `[a, b)`.
    - `safe_threshold` (default None): largest entropic calibration difference (ECD) in nats that is called safe,
      positive; see `torchcalib.results.Decision`. None does not decide.
    - `with_calibration` (default True): compute the gains of calibrators.
    - `with_intervals` (default True): compute 95% intervals, and the p-values and noise floors of rank-based errors.
    """

    class_names: Sequence[str] | None
    n_bins: int
    right: bool
    safe_threshold: float | None
    with_calibration: bool
    with_intervals: bool


class BuilderOptionsDict(ReportOptionsDict, total=False):
    """Options of `ReportBuilder` as keyword arguments: those of `ReportOptionsDict`, and this one.

    - `with_classes` (default True): compute class-wise errors of a multi-class task. They need sums over bins for each
      class, which are large for the tokens of a vocabulary, and all class probabilities.
    """

    with_classes: bool


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Checked options of a report."""

    input_format: InputFormat
    are_confidences: bool = False  # whether binary predictions are confidences, with targets 1 if they are correct
    class_names: tuple[str, ...] = ()  # empty if unknown
    n_bins: int = 15
    right: bool = False
    safe_threshold: float | None = None
    with_calibration: bool = True
    with_intervals: bool = True
    with_classes: bool = True

    @classmethod
    def from_arguments(cls, task: Task, options: Mapping[str, Any], is_comparison: bool = False) -> Self:
        """Check options, given as in `BuilderOptionsDict`. A comparison has no options of `ONLY_REPORTS`."""
        where = "a comparison" if is_comparison else "a report"
        known = [name for name in BuilderOptionsDict.__annotations__ if not (is_comparison and name in ONLY_REPORTS)]
        own = {name: options[name] for name in known if name in options}
        of_input = {name: own.pop(name) for name in [*own] if name in InputOptions.__annotations__}
        binning = Binning("equal_width", own.get("n_bins", cls.n_bins), own.get("right", cls.right))
        check_count("n_bins", binning.n_bins, at_most=MAX_BINS)
        for name in ("with_calibration", "with_intervals", "with_classes"):
            check_flag(name, own.get(name, True))
        if own.get("safe_threshold") is not None:
            check_positive("safe_threshold", own["safe_threshold"])
        class_names = checked_names(own.pop("class_names", None) or ())
        unknown = {name: value for name, value in options.items() if name not in known}
        check_option_names(unknown, ("preds", "target", "task", *known, *_ROLES), where)
        if of_input.get("batch_dims"):
            raise TypeError(
                f"`batch_dims` must be 0 for {where}, got {shown(of_input['batch_dims'])}. "
                f"Create one {where.split()[-1]} for each batch element."
            )
        if of_input.pop("weights", None) is not None:
            raise TypeError("`weights` must be None for `ReportBuilder`, got an array. Pass `weights` to `update`.")
        input_format = input_format_of(task, of_input)
        if input_format.task == "binary":
            check_name_count(class_names, 2)
        are_confidences = task == "confidence"
        return cls(input_format=input_format, are_confidences=are_confidences, class_names=class_names, **own)

    @property
    def task(self) -> Task:
        """Task of the report: binary if `positive_classes` is given."""
        return self.input_format.read_as

    @property
    def bins(self) -> dict[str, Any]:
        """Number of bins and rule for their edges."""
        return {"n_bins": self.n_bins, "right": self.right}

    def to_dict(self) -> dict[str, Any]:
        """Return the task and all options as plain Python values, from which `from_arguments` restores them."""
        return {
            "task": "confidence" if self.are_confidences else self.input_format.task,
            "class_names": list(self.class_names) or None,
            **{name: getattr(self, name) for name in ("n_bins", "right", *ONLY_REPORTS)},
            **{name: getattr(self.input_format, name) for name in _INPUT_SETTINGS},
        }

"""Raw tensors in, `Predictions` out: the only place that checks or converts input.

`InputFormat` says how tensors are to be read; it is a frozen value, so two metrics with equal formats can share one
reading. `Predictions` holds what every score and every bin is computed from, each row quantity computed once.

Axes: `...` batch, `N` samples, `C` classes (or labels).
"""

from torchcalib.predictions.arguments import (
    Average,
    InputOptions,
    NanPolicy,
    Task,
    check_average,
    check_choice,
    check_count,
    check_flag,
    check_internal,
    check_level,
    check_positive,
    check_seed,
    check_task,
    count_of_outputs,
    is_number,
    task_read_as,
)
from torchcalib.predictions.canonical import Predictions, by_replicates, in_all_replicates, replicates_at_once
from torchcalib.predictions.grouping import NO_GROUP, check_group_range, check_groups, in_groups
from torchcalib.predictions.reading import InputFormat, check_option_names, read_input
from torchcalib.predictions.values import check_numbering, check_weights, read_priors

__all__ = [
    "NO_GROUP",
    "Average",
    "InputFormat",
    "InputOptions",
    "NanPolicy",
    "Predictions",
    "Task",
    "by_replicates",
    "check_average",
    "check_choice",
    "check_count",
    "check_flag",
    "check_group_range",
    "check_groups",
    "check_internal",
    "check_level",
    "check_numbering",
    "check_option_names",
    "check_positive",
    "check_seed",
    "check_task",
    "check_weights",
    "count_of_outputs",
    "in_all_replicates",
    "in_groups",
    "is_number",
    "read_input",
    "read_priors",
    "replicates_at_once",
    "task_read_as",
]

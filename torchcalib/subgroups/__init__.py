"""Any metric of every group of rows: streamed (`ByGroup`), or of a function (`by_group`)."""

from torchcalib.subgroups.function import by_group
from torchcalib.subgroups.streaming import ByGroup
from torchcalib.subgroups.table import GroupTable

__all__ = ["ByGroup", "GroupTable", "by_group"]

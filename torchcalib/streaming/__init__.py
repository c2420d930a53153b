"""Statistics as torchmetrics states: metrics that stream and sync across ranks.

What a state is, and how it adds, is its `StateKind`'s to say. `CalibrationCollection` reads the input once for all of
its members and syncs them together: sums in one collective, whole samples in one more.
"""

from torchcalib.streaming.collection import CalibrationCollection
from torchcalib.streaming.metric import StreamingMetric
from torchcalib.streaming.repeats import distinct_rows
from torchcalib.streaming.wrapped import WrappedMetric

__all__ = ["CalibrationCollection", "StreamingMetric", "WrappedMetric", "distinct_rows"]

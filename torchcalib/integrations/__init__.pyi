from torchcalib.core.linear_logits import linear_logits as linear_logits
from torchcalib.integrations.huggingface import CalibrationMetrics as CalibrationMetrics
from torchcalib.integrations.ignite import IgniteMetric as IgniteMetric
from torchcalib.integrations.lightning import CalibrationMonitor as CalibrationMonitor
from torchcalib.integrations.lightning import SequentialMonitor as SequentialMonitor
from torchcalib.integrations.logging import log_report as log_report
from torchcalib.metrics.distributed_sampler import distinct_rows as distinct_rows

"""What chance has to do with a calibration error: its noise floor, a test of calibration, an interval, and bands.

`evidence_of` does it for any reading of bins or samples. `replicates` and `samples` make replicates of bins and
samples, `paths` lead from calibration to miscalibration, `inversion` turns a test into an interval, `averages` knows of
classes that depend on each other, and `testing` puts these together.
"""

from torchcalib.consistency.evidence import Evidence
from torchcalib.consistency.function import evidence
from torchcalib.consistency.metric import TestedMetric
from torchcalib.consistency.testing import Reading, evidence_of, evidence_of_each

__all__ = ["Evidence", "Reading", "TestedMetric", "evidence", "evidence_of", "evidence_of_each"]

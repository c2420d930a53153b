"""Function `torchcalib.report`, an alias of `Report.from_predictions`."""

from torchcalib.reporting.data import Report

report = Report.from_predictions

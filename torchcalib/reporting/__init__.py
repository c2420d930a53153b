"""Reports on predictions, comparisons of systems, and audits of language models.

A `ReportBuilder` (`building`) adds batches of predictions to sums, samples and a `buffer`. `assembling` computes the
report: `lines` the scores and calibration errors, `testing` the p-values and intervals. `diagnosis` computes the
evidence for causes of miscalibration, and `findings` decides among them. The report is an object of
`torchcalib.results`, which `render` writes as a page or on a terminal.
"""

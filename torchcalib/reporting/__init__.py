"""Reports on predictions, comparisons of systems, and calibration during training.

A `ReportBuilder` (`building`) adds batches of predictions to accumulators (`accumulators`, `sample_or_sketch`,
`buffer`, `groups`). `assembling` computes the report: `lines` computes scores and calibration errors, `testing` adds
p-values and intervals, and `diagnosis` finds the cause of miscalibration. `data` defines the classes `Report` and
`Comparison`, and `results` their lines and base class. `contents` defines their tables, which `terminal` and `html`
render.
"""

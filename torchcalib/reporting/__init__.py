"""Reports on predictions, comparisons of systems, and calibration during training.

A `ReportBuilder` (`building`) adds batches of predictions to accumulators (`accumulators`, `sample_or_sketch`,
`buffer`, `groups`). `lines` computes scores and calibration errors, and `testing` adds p-values and intervals. `data`
defines the classes `Report` and `Comparison`. `contents` defines their tables, which `terminal` and `html` render.
"""

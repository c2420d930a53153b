"""Reports on predictions, comparisons of systems, and calibration during training.

A `ReportBuilder` (`building`) adds batches of predictions to accumulators (`accumulators`, `sample_or_sketch`,
`buffer`, `groups`). `lines` computes the values from them, and `testing` adds p-values and intervals. `data` defines
the results, `Report` and `Comparison`. `contents` defines their tables, which `str`, `terminal` and `html` render.
"""

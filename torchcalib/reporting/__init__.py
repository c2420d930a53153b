"""Reports on predictions, comparisons of systems, and calibration during training.

Predictions are added to accumulators (`accumulators`, `sample_or_sketch`, `buffer`, `groups`), whose sums and samples
become lines with p-values and intervals (`lines`, `testing`). A `Report` or `Comparison` of them is data
(`data`). Its tables are described once (`contents`, `tables`) and shown by `str`, `terminal` and `html`.
"""

"""Reports on predictions, comparisons of systems, and calibration during training.

Predictions become sums and ranked samples (`metrics`, `bounded`, `kept`, `groups`), these become lines with evidence
and intervals (`lines`, `evidence`, `intervals`), and a `Report` or `Comparison` of them is data (`data`). Its tables
are described once (`contents`, `tables`) and shown by `str`, `terminal` and `html`.
"""

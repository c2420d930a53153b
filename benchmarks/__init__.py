"""Comparisons with other packages (`python -m benchmarks.run`) and the steps of `cuda_check.py`.

Not part of the package. Tests run this code without measuring times.
"""

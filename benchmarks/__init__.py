"""Benchmarks against other packages (`python -m benchmarks.run`), and the checks of `cuda_check.py`.

This is not part of the package. Tests run the code without measuring times.
"""

"""Measurements against what people use today (`python -m benchmarks.run`), and what `cuda_check.py` does on a GPU.

No part of the package. Tests run this code, but hold no time against anything.
"""

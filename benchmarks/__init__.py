"""Timings against what people use today: `python -m benchmarks.run`. No part of the package, and of no test."""

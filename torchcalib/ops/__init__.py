"""Numerical kernels on plain tensors, without metric names or user options.

Arguments are not validated, except for bounds that depend on the data, such as block sizes.
"""

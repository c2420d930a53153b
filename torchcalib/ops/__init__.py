"""Numerical kernels for tensors, independent of metrics and user options.

Arguments are not validated, except for bounds that depend on the data, such as block sizes.
"""

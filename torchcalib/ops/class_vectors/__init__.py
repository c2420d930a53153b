"""Kernels of the training penalties that are sums over pairs of class vectors; see `ops.penalties`."""

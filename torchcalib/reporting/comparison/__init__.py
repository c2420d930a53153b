"""Comparison of systems on the same targets, with paired bootstrap intervals of their differences."""

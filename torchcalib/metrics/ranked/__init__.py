"""Readings of a sample in order: TCE and its general form GCE, KS, and the CORP decomposition of scores.

TCE and GCE are readings of bins of the sample, and built of `binned`; KS and CORP read the sample itself.
"""

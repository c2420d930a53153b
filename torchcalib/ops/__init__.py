"""Operations on plain tensors, without metric names, options or checks.

There is one exception: an op checks bounds that depend on the data, such as block sizes against the number of samples.
"""

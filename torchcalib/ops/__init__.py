"""Operations on plain tensors. Everything above is written in terms of them.

No names, no options and no checks, with one exception: what depends on the data alone, such as bounds on the size of
a block against the number of samples, is checked by the op that needs it.
"""

"""Operations on plain tensors: no names, no options, no checks. Everything above is written in terms of them."""

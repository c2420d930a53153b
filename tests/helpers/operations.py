"""Counts of operations, each of which takes the host several microseconds on an accelerator."""

from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode

_WITHOUT_WORK = ("detach", "empty", "empty_like", "empty_strided", "new_empty", "set_", "promote_types")
"""Operations without work for a device. The emulated device reads an address by `empty` and `set_`."""


class _Names(TorchDispatchMode):
    """Record the names of operations that are not views."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in function._schema.returns)
        name = function.overloadpacket.__name__
        if not is_view and name not in _WITHOUT_WORK:
            self.found.append(name)
        return function(*arguments, **(options or {}))


@contextmanager
def operations():
    """Record the names of the operations in a block, without views: `with operations() as found`."""
    found = []
    with _Names(found):
        yield found

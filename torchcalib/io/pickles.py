"""Check the pickle in a `.pt` archive operation by operation, before torch loads it.

`torch.load(weights_only=True)` executes no code, but a small pickle can still exhaust time or memory. Examples are a
nested tuple as a key of a dict, whose hash takes exponential time, and a tensor that is larger than its storage. This
module simulates the stack of the unpickler. It accepts plain values, lists, tuples, dicts with plain keys, and tensors
within their storage. Only lists and dicts are changed after their creation.
"""

import math
import pickle
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

_MAX_OPERATIONS = 2**20  # about 35 for each tensor
_MAX_AXES = 64
_MAX_INTEGER = 2**63  # larger integers can have equal hashes, so that a dict of them takes quadratic time


class _Object(Enum):
    """Objects on the stack, by type. The checks do not use their content."""

    LIST = 0
    DICT = 1
    ORDERED_DICT = 2
    OTHER = 3


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset({"BINUNICODE", "SHORT_BINSTRING", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", *_CONSTANTS})
"""Operations that push their argument."""
_CONTAINERS = {"EMPTY_LIST": _Object.LIST, "EMPTY_DICT": _Object.DICT}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CHANGES: dict[str, tuple[int | None, set[_Object]]] = {
    "APPEND": (1, {_Object.LIST}),
    "APPENDS": (None, {_Object.LIST}),
    "SETITEM": (2, {_Object.DICT, _Object.ORDERED_DICT}),
    "SETITEMS": (None, {_Object.DICT, _Object.ORDERED_DICT}),
    "BUILD": (1, {_Object.ORDERED_DICT}),
}
"""Operations that change an object: the number of arguments, None for all after the mark; and the objects allowed."""
_PLAIN = (str, int, float, bool, type(None))

_STORAGES = {
    "UntypedStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_TENSORS = frozenset({"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"})
_PARAMETER = "torch._utils _rebuild_parameter"
_DEVICE_TENSOR = "torch._utils _rebuild_device_tensor_from_cpu_tensor"
_SPARSE_TENSOR = "torch._utils _rebuild_sparse_tensor"
_ORDERED_DICT = "collections OrderedDict"
_OTHERS = frozenset(
    {
        "torch Size",
        "torch device",
        "torch.serialization _get_layout",
        "torch._utils _rebuild_nested_tensor",
        "torch._utils _rebuild_meta_tensor_no_storage",
    }
)
"""Functions and classes whose result is no larger than their arguments."""


@dataclass(frozen=True, eq=False)
class _Global:
    """Function, class or dtype, by module and name."""

    name: str

    def itemsize(self) -> int:
        """Return the bytes per element of a storage class such as `torch.FloatStorage`, or of a dtype."""
        name = self.name.rpartition(" ")[2]
        dtype = getattr(torch, name) if name not in _STORAGES else _STORAGES[name]
        if not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"{name} is not the type of a storage")
        return dtype.itemsize


@dataclass(frozen=True, eq=False)
class _Storage:
    n_bytes: int
    itemsize: int


@dataclass(frozen=True, eq=False)
class _Tensor:
    n: int  # number of elements, which may share memory
    itemsize: int


_MARK = object()
"""Start of the arguments of an operation on the stack."""


def check_pickle(content: bytes, record_bytes: Mapping[str, int]) -> None:
    """Raise `UnpicklingError` unless a pickle contains only plain values, containers and tensors.

    A tensor that exceeds its storage record, and a damaged pickle, raise a ValueError.
    """
    checker = _Checker(record_bytes)
    for n, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if n >= _MAX_OPERATIONS:
            raise ValueError(f"the file must have at most {_MAX_OPERATIONS:,} pickle operations, got more")
        try:
            checker.run(operation.name, argument)
        except (IndexError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the pickle must be valid, got the operation {operation.name} in a wrong place"
            ) from error


class _Checker:
    """Simulated stack and memory of an unpickler."""

    def __init__(self, record_bytes: Mapping[str, int]) -> None:
        self.record_bytes = record_bytes
        self.unused_bytes = sum(record_bytes.values())
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        """Simulate one operation."""
        stack = self.stack
        if name in _VALUES:
            stack.append(_CONSTANTS.get(name, argument))
        elif name in _CONTAINERS:
            stack.append(_CONTAINERS[name])
        elif name in _TUPLES:
            stack.append(tuple(self.popped(_TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self.popped_to_mark()))
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memory[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memory[argument])
        elif name == "GLOBAL":
            stack.append(_Global(argument))
        elif name == "BINPERSID":
            stack.append(self.storage(stack.pop()))
        elif name == "REDUCE":
            function, arguments = self.popped(2)
            stack.append(self.result(function, arguments))
        elif name in _CHANGES:
            n, changed = _CHANGES[name]
            arguments = self.popped_to_mark() if n is None else self.popped(n)
            if not isinstance(stack[-1], _Object) or stack[-1] not in changed:
                raise TypeError("the object cannot be changed by this operation")
            if name.startswith("SETITEM"):
                self.check_keys(arguments)
        elif name not in ("PROTO", "STOP"):
            raise pickle.UnpicklingError(f"the operation {name} is not used for tensors and plain values")

    def popped(self, n: int) -> list[Any]:
        """Remove and return the last n values."""
        if len(self.stack) < n:
            raise IndexError("the stack has too few values")
        values = self.stack[len(self.stack) - n :]
        del self.stack[len(self.stack) - n :]
        return values

    def popped_to_mark(self) -> list[Any]:
        """Remove and return the values after the last mark, and remove the mark."""
        values: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def check_keys(self, pairs: list[Any]) -> None:
        """Raise if a key of a dict is not a plain value: the hash of a nested tuple may take exponential time."""
        for key in pairs[::2]:
            if not isinstance(key, _PLAIN) or (isinstance(key, int) and abs(key) >= _MAX_INTEGER):
                raise pickle.UnpicklingError("keys of a dict must be text or numbers of 64 bits, got another object")

    def storage(self, reference: Any) -> _Storage:
        """Return the storage for the persistent id `("storage", class, key, location, number of elements)`."""
        _, kind, key, _, n = reference
        if not isinstance(key, str) or not isinstance(n, int):
            raise TypeError("a storage must have a text as key, and a number of elements")
        n_bytes, itemsize = n * kind.itemsize(), kind.itemsize()
        if self.record_bytes.get(key, -1) < n_bytes or n < 0:
            raise ValueError(f"the file must contain {n_bytes:,} bytes of the storage {key}, got fewer")
        return _Storage(n_bytes, itemsize)

    def result(self, function: Any, arguments: Any) -> Any:
        """Return the result of a function in a pickle. Raise if the function is not one of torch for tensors."""
        if function.name in _TENSORS:
            return self.tensor(arguments, is_typed=function.name.endswith("v2"))
        if function.name == _PARAMETER:
            return arguments[0]
        if function.name == _ORDERED_DICT and arguments == ():
            return _Object.ORDERED_DICT
        if function.name == _DEVICE_TENSOR:
            self.use(arguments[0].n * arguments[1].itemsize())  # torch converts the dtype, which copies the values
            return arguments[0]
        if function.name == _SPARSE_TENSOR:
            for part in arguments[1]:
                self.use(part.n * part.itemsize if isinstance(part, _Tensor) else 0)  # torch checks all indices
        elif function.name not in _OTHERS:
            raise pickle.UnpicklingError(f"{function.name.replace(' ', '.')} is not a tensor or a plain value")
        return _Object.OTHER

    def tensor(self, arguments: Any, is_typed: bool) -> _Tensor:
        """Return a tensor in a storage. With `is_typed` the storage has the dtype of the tensor."""
        storage, offset, size, stride = arguments[:4]
        itemsize = storage.itemsize if is_typed else arguments[6].itemsize()
        if len(size) != len(stride) or len(size) > _MAX_AXES:
            raise ValueError(
                f"a tensor must have at most {_MAX_AXES} axes, got {len(size)} sizes and {len(stride)} strides"
            )
        if not all(isinstance(n, int) and 0 <= n < _MAX_INTEGER for n in (offset, *size, *stride)):
            raise ValueError("sizes of a tensor must be numbers of 64 bits that are not negative, got another value")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if 0 not in size and (last + 1) * itemsize > storage.n_bytes:
            raise ValueError(f"a tensor must lie within its storage, got shape {size[:8]} in {storage.n_bytes:,} bytes")
        return _Tensor(math.prod(size), itemsize)

    def use(self, n_bytes: int) -> None:
        """Raise if functions copy, or search, more bytes than the file contains."""
        self.unused_bytes -= n_bytes
        if self.unused_bytes < 0:
            raise ValueError("tensors must be stored completely, got fewer values in the file")

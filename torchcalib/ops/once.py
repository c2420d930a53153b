"""Properties that are computed on first access and stored."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class once(Generic[T]):  # noqa: N801 - used as a decorator
    """A `functools.cached_property` that stores values in `self.computed`.

    In Python 3.11 `cached_property` takes a lock, which `torch.compile` cannot trace.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, kind: type | None = None) -> T:
        if self.name not in owner.computed:
            owner.computed[self.name] = self.compute(owner)
        value: T = owner.computed[self.name]
        return value

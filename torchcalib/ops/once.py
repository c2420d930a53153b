"""Cached properties that `torch.compile` can trace."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class once(Generic[T]):  # noqa: N801 - used as a decorator
    """Decorator for a cached property whose value is stored in the dictionary `self.computed` of the instance.

    In Python 3.11 `functools.cached_property` uses a lock, which `torch.compile` cannot trace.
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

"""Progress of long computations, which report their parts to a listener such as a progress bar, if there is one."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

Listener = Callable[[float, str], None]
"""Function of the fraction of the computation that was completed since the last call, and of the next part."""


@dataclass
class _Part:
    listener: Listener
    size: float  # fraction of the whole computation
    done: float = 0.0  # fraction of the whole computation that nested parts completed


_current: ContextVar[_Part | None] = ContextVar("_current", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` for each part of the computation in the `with` block."""
    token = _current.set(_Part(listener, 1.0))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def part(share: float, description: str = "") -> Iterator[None]:
    """Mark a part of a computation, a fraction `share` of the enclosing part or computation. Parts can be nested."""
    outer = _current.get()
    if outer is None:
        yield
        return
    inner = _Part(outer.listener, share * outer.size)
    outer.listener(0.0, description)
    token = _current.set(inner)
    try:
        yield
    finally:
        _current.reset(token)
    outer.listener(inner.size - inner.done, "")
    outer.done += inner.size


def in_parts(items: Collection[T], name_of: Callable[[T], str]) -> Iterator[T]:
    """Yield items, and mark the loop over each as an equal part of the enclosing part."""
    for item in items:
        with part(1 / len(items), name_of(item)):
            yield item

"""Sync and async clients from one implementation: every call is written once, as a coroutine.

The async client awaits it. The sync client runs it to completion on a transport whose coroutines never suspend.
"""

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

P = ParamSpec("P")
T = TypeVar("T")


class Sync:
    """Mode of the synchronous client."""


class Async:
    """Mode of the asynchronous client."""


M = TypeVar("M")
"""`Sync` or `Async`."""


class Resource(Generic[M]):
    """Base class of objects with `call` and `stream` methods."""

    is_async: bool


class call(Generic[P, T]):
    """Descriptor of a coroutine method that returns one result."""

    def __init__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, resource: Resource[Sync], owner: Any) -> Callable[P, T]: ...
    @overload
    def __get__(self, resource: Resource[Async], owner: Any) -> Callable[P, Awaitable[T]]: ...
    @overload
    def __get__(self, resource: None, owner: Any) -> "call[P, T]": ...
    def __get__(self, resource: Any, owner: Any) -> Any:
        if resource is None:
            return self
        bound = self._function.__get__(resource)
        if resource.is_async:
            return bound
        return functools.wraps(bound)(lambda *args, **named: run_sync(bound(*args, **named)))


class stream(Generic[P, T]):
    """Descriptor of an asynchronous generator method."""

    def __init__(self, function: Callable[Concatenate[Any, P], AsyncGenerator[T]]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, resource: Resource[Sync], owner: Any) -> Callable[P, Generator[T]]: ...
    @overload
    def __get__(self, resource: Resource[Async], owner: Any) -> Callable[P, AsyncGenerator[T]]: ...
    @overload
    def __get__(self, resource: None, owner: Any) -> "stream[P, T]": ...
    def __get__(self, resource: Any, owner: Any) -> Any:
        if resource is None:
            return self
        bound = self._function.__get__(resource)
        if resource.is_async:
            return bound
        return functools.wraps(bound)(lambda *args, **named: _iterate_sync(bound(*args, **named)))


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("a call of the synchronous client suspended without an event loop")


def _iterate_sync(generator: AsyncGenerator[T]) -> Generator[T]:
    try:
        while True:
            try:
                item = run_sync(generator.__anext__())
            except StopAsyncIteration:
                return
            yield item
    finally:
        run_sync(generator.aclose())

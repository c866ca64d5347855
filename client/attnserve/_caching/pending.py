"""A cache that is not there yet: to be awaited, or entered at once with `async with`.

In: a coroutine that returns a cache. Out: still a coroutine, for `await`, tasks and `gather`. Beside that, it is an
asynchronous context manager, as the cache is, so that ``async with client.create_cache(8, 64) as cache`` needs no
`await`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T", bound=AbstractAsyncContextManager[Any])


class Pending(Coroutine[Any, Any, T], AbstractAsyncContextManager[T]):
    """What a coroutine is about to return. Until it is awaited or entered, nothing has begun."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], name: str) -> None:
        self._coroutine = coroutine
        self.__qualname__ = name  # as tasks print it

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def send(self, value: Any, /) -> Any:
        """Resumes the coroutine, as a task does."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raises an error in the coroutine, such as that the task is cancelled."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Ends the coroutine."""
        self._coroutine.close()

    if not TYPE_CHECKING:  # or type checkers would let any name pass

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)
            raise AttributeError(f"{self.__qualname__}(...).{name}: await it first, or enter it with `async with`")

    async def __aenter__(self) -> T:
        # Nothing is awaited after the cache is there, so that no cancellation comes between it and the body.
        self._entered = await self._coroutine
        return self._entered

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._entered.__aexit__(kind, error, traceback)


def pending(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Pending[T]]:
    """For an `async def` that returns a cache: what it returns can be entered without being awaited."""

    @functools.wraps(method)
    def begun(*args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        return Pending(method(*args, **kwargs), method.__qualname__)

    return begun

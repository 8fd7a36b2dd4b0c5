"""Lazy futures, for the stages of a hook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Future(ABC, Generic[T]):
    """Result of an asynchronous operation.

    Futures are lazy: functions that are passed to `map` and `then` run once, when the value is
    requested, on the thread that requests it. They never run on a thread of a backend.

    Example:
        >>> Future.of(3).map(lambda n: n + 1).then(lambda n: Future.of(10 * n)).wait()
        40
    """

    @staticmethod
    def of(value: U) -> Future[U]:
        """A future with a value."""
        return _Ready(value)

    @staticmethod
    def started(is_ready: Callable[[], bool], take: Callable[[], U]) -> Future[U]:
        """A future of an operation that was started.

        Args:
            is_ready: returns True if `take` would return at once; must not block.
            take: waits for the value and returns it; called once.
        """
        return _Started(is_ready, take)

    def map(self, fn: Callable[[T], U]) -> Future[U]:
        """A future of `fn(value)`. `fn` must not communicate.

        Raises:
            TypeError: `fn` returned a `Future`; raised when the value is requested.
        """

        def take() -> U:
            value = fn(self.wait())
            if isinstance(value, Future):
                raise TypeError("the function passed to map returned a Future; use then instead")
            return value

        return _Started(lambda: self.ready, take, self)

    def then(self, fn: Callable[[T], Future[U]]) -> Future[U]:
        """A future of the next stage, which `fn(value)` starts.

        Raises:
            TypeError: `fn` did not return a `Future`; raised when the stage is started.
        """
        return _Chained(self, fn)

    @property
    def done(self) -> bool:
        """True if `wait` would return without waiting for other ranks. Does not block."""
        return self.ready and not self.pending

    @abstractmethod
    def wait(self) -> T:
        """Wait for the value and return it. Starts the remaining stages in order."""

    @property
    @abstractmethod
    def pending(self) -> bool:
        """True if a stage has not been started."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """True if the input of the next stage is there, or without one the value. Does not
        block."""

    @abstractmethod
    def wait_ready(self) -> None:
        """Wait until `ready`."""

    @abstractmethod
    def advance(self) -> None:
        """Wait for the input of the next stage, if there is one, and start that stage only."""


class _Ready(Future[T]):
    def __init__(self, value: T) -> None:
        self._value = value

    ready = True
    pending = False

    def wait(self) -> T:
        return self._value

    def wait_ready(self) -> None:
        pass

    def advance(self) -> None:
        pass


class _Started(Future[T]):
    """Future of a value that `take` returns. `source` has earlier stages, if there are any."""

    def __init__(
        self, is_ready: Callable[[], bool], take: Callable[[], T], source: Future[Any] | None = None
    ) -> None:
        self._is_ready: Callable[[], bool] | None = is_ready
        self._take = take
        self._source = source
        self._value: T

    @property
    def ready(self) -> bool:
        return self._is_ready is None or self._is_ready()

    @property
    def pending(self) -> bool:
        return self._source is not None and self._source.pending

    def wait(self) -> T:
        if self._is_ready is not None:
            self._value = self._take()
            self._is_ready = self._source = None
            del self._take
        return self._value

    def wait_ready(self) -> None:
        if self._source is None:
            self.wait()
        else:
            self._source.wait_ready()

    def advance(self) -> None:
        if self._source is not None:
            self._source.advance()


class _Chained(Future[U]):
    def __init__(self, source: Future[T], fn: Callable[[T], Future[U]]) -> None:
        self._source: Future[T] | None = source
        self._fn = fn
        self._next: Future[U] = _Ready(None)  # type: ignore[arg-type]  # until the stage starts

    @property
    def ready(self) -> bool:
        return self._next.ready if self._source is None else self._source.ready

    @property
    def pending(self) -> bool:
        return self._source is not None or self._next.pending

    def wait(self) -> U:
        while self.pending:
            self.advance()
        return self._next.wait()

    def wait_ready(self) -> None:
        if self._source is None:
            self._next.wait_ready()
        elif self._source.pending:
            self._source.wait_ready()
        else:
            self._source.wait()

    def advance(self) -> None:
        if self._source is None:
            self._next.advance()
        elif self._source.pending:
            self._source.advance()
        else:
            started = self._fn(self._source.wait())
            if not isinstance(started, Future):
                raise TypeError(
                    f"the function passed to then returned a {type(started).__name__}, not a "
                    f"Future; use map instead"
                )
            self._next, self._source = started, None
            del self._fn

"""Results that are not there yet, and what is to be done with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Future(ABC, Generic[T]):
    """A value that ranks are working on.

    Futures are lazy: what `map` and `then` were given runs when the value is asked for, on the
    thread that asks, and once. No thread of a backend calls back.

    Example:
        >>> Future.of(3).map(lambda n: n + 1).then(lambda n: Future.of(10 * n)).wait()
        40
    """

    @staticmethod
    def of(value: U) -> Future[U]:
        """A value that is there."""
        return _Ready(value)

    @staticmethod
    def started(is_ready: Callable[[], bool], take: Callable[[], U]) -> Future[U]:
        """A value that something which was started brings.

        Args:
            is_ready: whether `take` would return at once; does not block.
            take: waits for it; called once.
        """
        return _Started(is_ready, take)

    def map(self, fn: Callable[[T], U]) -> Future[U]:
        """What `fn` makes of the value, without communication.

        Raises:
            TypeError: when the value is asked for, if `fn` gave a `Future`.
        """
        return _Mapped(self, fn)

    def then(self, fn: Callable[[T], Future[U]]) -> Future[U]:
        """What the next stage brings, which `fn` starts once the value is there.

        Raises:
            TypeError: when the stage is started, if `fn` gave no `Future`.
        """
        return _Chained(self, fn)

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return without waiting for other ranks; does not block."""

    @abstractmethod
    def wait(self) -> T:
        """The value. Starts the stages that were not started, each when the one before is done."""

    @property
    @abstractmethod
    def pending(self) -> bool:
        """Whether a stage has not been started."""

    @abstractmethod
    def advance(self, *, block: bool) -> bool:
        """Starts the next stage, and no other.

        Args:
            block: whether to wait for what the stage builds on.

        Returns:
            False if that is not there and was not waited for.
        """


class _Ready(Future[T]):
    def __init__(self, value: T) -> None:
        self._value = value

    done = True
    pending = False

    def wait(self) -> T:
        return self._value

    def advance(self, *, block: bool) -> bool:
        return True


class _Started(Future[T]):
    def __init__(self, is_ready: Callable[[], bool], take: Callable[[], T]) -> None:
        self._is_ready: Callable[[], bool] | None = is_ready
        self._take = take
        self._value: T

    pending = False

    @property
    def done(self) -> bool:
        return self._is_ready is None or self._is_ready()

    def wait(self) -> T:
        if self._is_ready is not None:
            self._value = self._take()
            self._is_ready = None
            del self._take
        return self._value

    def advance(self, *, block: bool) -> bool:
        return True


class _Mapped(Future[U]):
    def __init__(self, source: Future[T], fn: Callable[[T], U]) -> None:
        self._source: Future[T] | None = source
        self._fn = fn
        self._value: U

    @property
    def done(self) -> bool:
        return self._source is None or self._source.done

    @property
    def pending(self) -> bool:
        return self._source is not None and self._source.pending

    def wait(self) -> U:
        if self._source is not None:
            value = self._fn(self._source.wait())
            if isinstance(value, Future):
                raise TypeError("map was given a function that returns a Future; use then for it")
            self._value = value
            self._source = None
            del self._fn
        return self._value

    def advance(self, *, block: bool) -> bool:
        return self._source is None or self._source.advance(block=block)


class _Chained(Future[U]):
    def __init__(self, source: Future[T], fn: Callable[[T], Future[U]]) -> None:
        self._source: Future[T] | None = source
        self._fn = fn
        self._next: Future[U] = _Ready(None)  # type: ignore[arg-type]  # until the stage starts

    @property
    def done(self) -> bool:
        return self._source is None and self._next.done

    @property
    def pending(self) -> bool:
        return self._source is not None or self._next.pending

    def wait(self) -> U:
        while self.pending:
            self.advance(block=True)
        return self._next.wait()

    def advance(self, *, block: bool) -> bool:
        if self._source is None:
            return self._next.advance(block=block)
        if self._source.pending:
            return self._source.advance(block=block)
        if not (block or self._source.done):
            return False
        started = self._fn(self._source.wait())
        if not isinstance(started, Future):
            raise TypeError(
                f"then was given a function that returns a {type(started).__name__}, not a "
                f"Future; use map for it"
            )
        self._next, self._source = started, None
        del self._fn
        return True

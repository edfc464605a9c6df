"""What a process of the run is to the rest: a spec to start it, a handle to call and to end it.

Owns the seam between the pipeline and whatever places workers (this machine, this process, later a
cluster). Nothing here runs, and nothing here knows what a worker does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar, Protocol, Self, TypeAlias, TypeVar, overload

T = TypeVar("T")

LOG_END = "; end of "
"""What comes between how a worker ended and the last lines of its log, where it has some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker to start.

    ``target`` is ``"module:attr"`` of a ``ServiceFactory``; ``payload`` is handed to it as it is.
    ``threads`` is the size of the OpenMP and MKL pools; ``env`` is added to the environment and
    wins over what the scheduler sets. Inline workers share the controller's threads and
    environment.
    """

    name: str
    target: str
    payload: bytes = b""
    threads: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_seconds: float = 120.0


class Service(Protocol):
    """What a worker offers: the async methods named in ``METHODS``, annotated and positional."""

    METHODS: ClassVar[tuple[str, ...]]


ServiceFactory: TypeAlias = Callable[[bytes], AbstractAsyncContextManager[Service]]


class WorkerClient(Protocol):
    """Typed calls to one worker."""

    @property
    def name(self) -> str:
        """The worker's name, in front of every error from it."""

    @overload
    async def call(
        self, method: str, *args: object, returns: type[T], timeout: float | None
    ) -> T: ...

    @overload
    async def call(
        self, method: str, *args: object, returns: None = None, timeout: float | None
    ) -> None: ...

    async def call(
        self, method: str, *args: object, returns: type[T] | None = None, timeout: float | None
    ) -> T | None:
        """Call ``method``; ``timeout`` in seconds, None for as long as the worker lives.

        Raises:
            StallError: no answer within ``timeout``; the method is cancelled.
            WorkerError: the worker is gone, or raised something unexpected.
            OffbeatError: what the method raised, as the same class.
        """

    async def health(self, *, timeout: float) -> None:
        """Return when the worker's event loop answers; raises StallError or WorkerError."""


class WorkerHandle(Protocol):
    """A worker that is ready for calls, and the right to end it."""

    @property
    def name(self) -> str:
        """The name from its spec."""

    @property
    def pid(self) -> int:
        """Its process; the controller's own for an inline worker."""

    @property
    def client(self) -> WorkerClient:
        """Calls to it."""

    async def wait(self) -> str:
        """Return when the worker has ended, however it did: how, and the end of its log."""

    async def close(self, grace: float = 5.0) -> None:
        """End it: ask, wait ``grace`` seconds, then kill. Does nothing once it has ended."""


class Scheduler(Protocol):
    """Starts workers and ends all of them when its context ends."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start one worker and wait until it serves; several may start at once.

        Raises:
            StallError: not ready within ``start_timeout_seconds``.
            WorkerError: died before it was ready, or failed unexpectedly.
            OffbeatError: what its factory raised, as the same class.
        """

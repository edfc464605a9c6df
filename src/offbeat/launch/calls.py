"""Typed calls into a service, without a transport.

Owns what a call means on both sides: which methods a service offers, how arguments and results are
decoded by the method's own annotations, and how a failure crosses a process boundary (as a class
name and a message, never as an object). Knows no HTTP and no processes: ``rpc`` carries the bytes
to another process, ``inline`` hands them over directly; both use this and so behave the same.
"""

from __future__ import annotations

import inspect
import traceback
import typing
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass

import msgspec

from offbeat.errors import OffbeatError, WorkerError, boundary, by_name
from offbeat.launch.codec import check, decode, encode


class Fault(msgspec.Struct, frozen=True, kw_only=True, tag="fault"):
    """A failure on its way to another process. ``trace`` is empty when the message says it all."""

    error: str
    message: str
    trace: str = ""

    @classmethod
    def of(cls, exc: OffbeatError) -> Fault:
        """``exc`` for the wire, with the traceback of the foreign exception behind it, if any."""
        trace = "".join(traceback.format_exception(exc)) if exc.__cause__ is not None else ""
        return cls(error=type(exc).__name__, message=str(exc), trace=trace)

    def exception(self, worker: str) -> OffbeatError:
        """The same error here: same class, the worker's name in front, the traceback as a note."""
        prefix = f"{worker}: "
        message = self.message if self.message.startswith(prefix) else prefix + self.message
        exc = by_name(self.error)(message)
        if self.trace:
            exc.add_note(f"in {worker}:\n{self.trace.rstrip()}")
        return exc


@dataclass(frozen=True, slots=True, kw_only=True)
class _Method:
    call: Callable[..., Awaitable[object]]
    parameters: tuple[Hashable, ...]
    required: int


class Dispatcher:
    """Decodes a call, makes it, and encodes what came back.

    Args:
        service: any object.
        methods: names of its ``async def`` methods to offer; fully annotated, positional.

    Raises:
        TypeError: a method cannot be offered, found here rather than at its first call.
    """

    def __init__(self, service: object, methods: Sequence[str]) -> None:
        self._methods = {name: _describe(service, name) for name in methods}

    async def invoke(self, method: str, body: bytes) -> bytes:
        """Call ``method`` with the arguments in ``body``, a msgpack array.

        Raises:
            OffbeatError: what the method raised; anything foreign as ``WorkerError``.
        """
        target = self._methods.get(method)
        if target is None:
            raise WorkerError(f"no method {method!r}; there are {', '.join(self._methods)}")
        arguments = _arguments(method, target, body)
        with boundary(WorkerError, method):
            result = await target.call(*arguments)
        return encode(result)


def _describe(service: object, name: str) -> _Method:
    call = getattr(service, name, None)
    where = f"{type(service).__name__}.{name}"
    if not inspect.iscoroutinefunction(call):
        raise TypeError(f"{where} is not an async method")
    hints = typing.get_type_hints(call)
    parameters = inspect.signature(call).parameters.values()
    for p in parameters:
        if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            raise TypeError(f"{where}: parameter {p.name!r} is not positional")
    missing = [n for n in (*(p.name for p in parameters), "return") if n not in hints]
    if missing:
        raise TypeError(f"{where} has no annotation for {', '.join(missing)}")
    for hint in hints.values():
        check(hint)
    return _Method(
        call=call,
        parameters=tuple(hints[p.name] for p in parameters),
        required=sum(p.default is p.empty for p in parameters),
    )


def _arguments(method: str, target: _Method, body: bytes) -> list[object]:
    raws = decode(body, list[msgspec.Raw])
    if not target.required <= len(raws) <= len(target.parameters):
        raise WorkerError(
            f"{method} takes {len(target.parameters)} arguments, {len(raws)} were given"
        )
    return [
        decode(memoryview(raw), typing.cast("type[object]", hint))
        for raw, hint in zip(raws, target.parameters, strict=False)
    ]

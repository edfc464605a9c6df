"""A question that is not answered, and how the OpenAI protocol says so."""

from __future__ import annotations

from http import HTTPStatus

from offbeat.errors import (
    DataError,
    GenerationError,
    OffbeatError,
    PromptTooLong,
    StallError,
    WorkerError,
)

_STATUS: dict[type[OffbeatError], tuple[HTTPStatus, str]] = {
    PromptTooLong: (HTTPStatus.BAD_REQUEST, "context_length_exceeded"),
    DataError: (HTTPStatus.BAD_REQUEST, "invalid_messages"),
    StallError: (HTTPStatus.GATEWAY_TIMEOUT, "no_answer_in_time"),
    WorkerError: (HTTPStatus.SERVICE_UNAVAILABLE, "engine_unavailable"),
    GenerationError: (HTTPStatus.INTERNAL_SERVER_ERROR, "generation_failed"),
}
"""What an error of ours is called; the first class that fits counts."""


class Refusal(Exception):
    """Never leaves the gateway: it becomes a response.

    Args:
        message: for the person who asked.
        param: the parameter at fault, if it is one.
        code: a word for programs.
    """

    def __init__(
        self,
        message: str,
        *,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self._param = param
        self._code = code

    @classmethod
    def of(cls, error: OffbeatError) -> Refusal:
        """The refusal that ``error`` means."""
        fitting = (found for kind, found in _STATUS.items() if isinstance(error, kind))
        status, code = next(fitting, (HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error"))
        return cls(str(error), status=status, code=code)

    @property
    def body(self) -> dict[str, object]:
        """As JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self._param,
                "code": self._code,
            }
        }

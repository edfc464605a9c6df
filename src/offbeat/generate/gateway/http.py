"""The gateway: HTTP in front of ``Answers``, as the OpenAI protocol has it.

Owns routes, the token, how many answers may be open, and what an error looks like; knows no engine
and no process.

    GET  /v1/models, /v1/models/<name>
    POST /v1/completions, /v1/chat/completions
    GET  /health                 without a token, and then says only that there is one who answers

A client that hangs up cancels its request, which frees the slot.
"""

from __future__ import annotations

import hmac
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import TypeAlias

import msgspec
from aiohttp import web

from offbeat.errors import OffbeatError, boundary
from offbeat.generate.gateway.answers import Answers, Ask, Piece
from offbeat.generate.gateway.body import Body, ChatBody, CompletionBody, parse
from offbeat.generate.gateway.refusal import Refusal
from offbeat.generate.gateway.replies import ChatReply, CompletionReply, Reply
from offbeat.launch.web import serve_application
from offbeat.types import Completion, PolicyVersion

log = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 4 * 2**20
"""Of one question; reading it holds up the event loop, which may be that of a run."""

MAX_OPEN_ANSWERS = 1024
"""Answers that are written or wait for a slot; what would exceed it is refused, to come back."""


class Gateway:
    """One model under one name.

    Args:
        name: what clients call the model.
        token: what they must send; None lets everybody ask.
        version: the live version of weights that change; None where they do not.
    """

    def __init__(
        self,
        answers: Answers,
        *,
        name: str,
        token: str | None,
        version: Callable[[], PolicyVersion] | None = None,
    ) -> None:
        self._answers = answers
        self._name = name
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._version = version
        self._created = int(time.time())
        self._open = 0

    def application(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let in who has the token; turn every error into the protocol's."""
        try:
            with boundary(OffbeatError, "unexpected error (--debug shows where)"):
                return await self._admit(request, handler)
        except OffbeatError as exc:
            refusal = Refusal.of(exc)
            if refusal.status >= 500:
                unexpected = type(exc) is OffbeatError and log.isEnabledFor(logging.DEBUG)
                trace = exc.__cause__ if unexpected else None
                log.error("%s %s: %s", request.method, request.path, exc, exc_info=trace)
            return _refused(refusal)

    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path != "/health":
                self._authorize(request)
            return await handler(request)
        except Refusal as refusal:
            return _refused(refusal)
        except web.RequestPayloadError as exc:
            return _refused(Refusal(f"the body cannot be read: {exc}"))
        except web.HTTPException as exc:
            text = f"{request.method} {request.path}: {exc.reason}"
            return _refused(Refusal(text, status=HTTPStatus(exc.status)))

    def _is_known(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        return self._expected is None or hmac.compare_digest(given, self._expected)

    def _authorize(self, request: web.Request) -> None:
        if not self._is_known(request):
            raise Refusal(
                "the token is wrong or missing: send the header `Authorization: Bearer TOKEN` "
                "(api_key in OpenAI's client)",
                status=HTTPStatus.UNAUTHORIZED,
                code="invalid_api_key",
            )

    # What there is

    async def _health(self, request: web.Request) -> web.Response:
        live = self._live() if self._is_known(request) else {}
        return _json({"status": "ok", **live})

    async def _models(self, _request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._check_name(request.match_info["name"])
        return _json(self._card())

    def _card(self) -> dict[str, object]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "offbeat",
            "max_model_len": self._answers.max_len,
            **self._live(),
        }

    def _live(self) -> dict[str, object]:
        return {} if self._version is None else {"version": self._version()}

    def _check_name(self, name: str | None) -> None:
        if name not in (None, self._name):
            raise Refusal(
                f"model: there is no {name!r} here; the model is called {self._name!r}",
                status=HTTPStatus.NOT_FOUND,
                param="model",
                code="model_not_found",
            )

    # Answers

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = parse(await request.read(), CompletionBody)
        self._check_name(body.model)
        return await self._answer(request, body, self._reply(body, CompletionReply))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = parse(await request.read(), ChatBody)
        self._check_name(body.model)
        return await self._answer(request, body, self._reply(body, ChatReply))

    def _reply(self, body: CompletionBody | ChatBody, kind: type[Reply]) -> Reply:
        return kind(
            ask=body.question(self._answers),
            model=self._name,
            decode=self._answers.codec.decode,
            logprobs=body.wants_logprobs,
            token_ids=bool(body.return_token_ids),
            versioned=self._version is not None,
        )

    async def _answer(self, request: web.Request, body: Body, reply: Reply) -> web.StreamResponse:
        with self._opened(reply.ask):
            if body.stream:
                return await self._stream(request, reply, include_usage=body.include_usage)
            return _json(reply.whole(await self._answers.whole(reply.ask)))

    @contextmanager
    def _opened(self, ask: Ask) -> Iterator[None]:
        """Count the answers to ``ask`` as open while inside."""
        if ask.answers > MAX_OPEN_ANSWERS:
            raise Refusal(
                f"{len(ask.prompts)} prompts with n {ask.n} ask for {ask.answers} answers, more "
                f"than the {MAX_OPEN_ANSWERS} that may be open; send several requests",
                param="prompt",
            )
        if self._open + ask.answers > MAX_OPEN_ANSWERS:
            raise Refusal(
                f"{self._open} answers are open, of at most {MAX_OPEN_ANSWERS}; {ask.answers} more "
                "do not fit: try again later",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                code="too_many_requests",
            )
        self._open += ask.answers
        try:
            yield
        finally:
            self._open -= ask.answers

    async def _stream(
        self, request: web.Request, reply: Reply, *, include_usage: bool
    ) -> web.StreamResponse:
        """Server-sent events; an error that comes too late for a status is the last of them."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        try:
            async with self._answers.pieces(reply.ask) as pieces:
                await response.prepare(request)
                ended = await _send_pieces(response, reply, pieces)
            if include_usage:
                await _send(response, reply.counts(ended))
            await response.write(b"data: [DONE]\n\n")
        except ConnectionResetError:
            log.debug("a client left its stream")
        except OffbeatError as exc:
            if not response.prepared:
                raise
            log.error("%s: %s", request.path, exc)
            await _send(response, Refusal.of(exc).body)
        return response


async def _send_pieces(
    response: web.StreamResponse, reply: Reply, pieces: AsyncIterator[Piece]
) -> list[Completion]:
    """Send what comes; returns the completions."""
    begun: set[int] = set()
    ended: list[Completion] = []
    async for piece in pieces:
        first = piece.index not in begun
        if reply.shows(piece, first=first):
            begun.add(piece.index)
            await _send(response, reply.chunk(piece, first=first))
        if piece.completion is not None:
            ended.append(piece.completion)
    return ended


async def _send(response: web.StreamResponse, event: dict[str, object]) -> None:
    await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")


def _json(body: dict[str, object], status: int = 200) -> web.Response:
    data = msgspec.json.encode(body)
    return web.Response(body=data, status=status, content_type="application/json")


def _refused(refusal: Refusal) -> web.Response:
    return _json(refusal.body, refusal.status)


@asynccontextmanager
async def serve_gateway(gateway: Gateway, at: socket.socket) -> AsyncIterator[str]:
    """Answer at the listening socket ``at`` until the context ends; yields the base URL."""
    host, port = at.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    async with serve_application(gateway.application(), at, lambda what: _refused(Refusal(what))):
        yield f"http://{shown}:{port}/v1"

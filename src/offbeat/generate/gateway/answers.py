"""From a question to its answers, whole or while they are written; no HTTP.

Owns the names and random streams of requests from outside of the run: their own, so that nothing of
a run depends on them. Knows one ``Generator`` and the model's tokenizer.

Consumes ``Ask``s; produces ``Completion``s and ``Piece``s; waits for the generator, in whose line
requests stand behind those that came before; unblocked by its answers, its error or a cancellation.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from offbeat.data.tokens import TextCodec
from offbeat.errors import DataError, GenerationError, PromptTooLong, true_cause
from offbeat.generate.gateway.text import AnswerText
from offbeat.protocols import Generator
from offbeat.seeds import derive
from offbeat.types import (
    OUTSIDE_GROUP,
    Completion,
    FloatArray,
    GenerateRequest,
    IntArray,
    Message,
    Progress,
    SamplingParams,
)

_Event: TypeAlias = tuple[int, Progress | Completion]
"""Which answer, and what came to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """``n`` answers to each of ``prompts``, in this order; ``seed`` None takes a fresh one."""

    prompts: tuple[IntArray, ...]
    params: SamplingParams
    n: int = 1
    seed: int | None = None

    @property
    def answers(self) -> int:
        """How many answers there will be."""
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What came to answer ``index``. The last one of an answer has its ``completion``.

    ``text`` may be behind ``token_ids``; all of an answer's pieces together are its completion.
    """

    index: int
    text: str
    token_ids: IntArray
    logprobs: FloatArray
    completion: Completion | None = None


class StreamedAnswer:
    """One answer of which pieces are out."""

    def __init__(self, index: int, text: AnswerText) -> None:
        self._index = index
        self._text = text
        self._written: list[int] = []

    def wrote(self, progress: Progress) -> Piece:
        """What is new of ``progress``, which may tell again what is out already."""
        known = max(0, len(self._written) - progress.start)
        ids, logprobs = progress.token_ids[known:], progress.logprobs[known:]
        self._written += ids.tolist()
        return Piece(
            index=self._index, text=self._text.wrote(ids), token_ids=ids, logprobs=logprobs
        )

    def ended(self, completion: Completion) -> Piece:
        """The rest.

        Raises:
            GenerationError: it is the rest of another answer than the one that is out.
        """
        out = len(self._written)
        if completion.token_ids[:out].tolist() != self._written:
            raise GenerationError(
                "the generator was lost while it answered, and its successor has newer weights, "
                "which write another answer: ask again"
            )
        return Piece(
            index=self._index,
            text=self._text.ended(completion),
            token_ids=completion.token_ids[out:],
            logprobs=completion.logprobs[out:],
            completion=completion,
        )


class Answers:
    """Asks ``generator``.

    Args:
        max_len: most tokens of prompt plus answer.
        at_once: answers that are asked of the generator at the same time, the others wait here;
            None: all of them.
    """

    def __init__(
        self, generator: Generator, *, codec: TextCodec, max_len: int, at_once: int | None = None
    ) -> None:
        self.codec = codec
        self._places: AbstractAsyncContextManager[None] = (
            nullcontext() if at_once is None else asyncio.Semaphore(at_once)
        )
        self.max_len = max_len
        self._generator = generator

    def room(self, prompt: IntArray) -> int:
        """Most tokens that an answer to ``prompt`` may have.

        Raises:
            PromptTooLong: not even one.
        """
        left = self.max_len - len(prompt)
        if left < 1:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens; with at least 1 token of answer it exceeds "
                f"the context of {self.max_len}"
            )
        return left

    async def whole(self, ask: Ask) -> list[Completion]:
        """All answers, once the last of them has ended.

        Raises:
            PromptTooLong: a prompt and its answer may not fit the context.
            OffbeatError: what the generator raised.
        """
        requests = self._requests(ask)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._generate(r)) for r in requests]
        except BaseExceptionGroup as errors:
            raise true_cause(errors) from errors
        return [task.result() for task in running]

    @asynccontextmanager
    async def pieces(self, ask: Ask) -> AsyncIterator[AsyncIterator[Piece]]:
        """The pieces of all answers as they come; leaving the block early ends the requests.

        Raises:
            PromptTooLong, OffbeatError: see ``whole``; what the generator raises ends the block.
        """
        requests = self._requests(ask)
        # At most two entries for each token that the answers may have, and again after a loss.
        events: asyncio.Queue[_Event] = asyncio.Queue()
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._stream(i, request, events))
                    for i, request in enumerate(requests)
                ]
                yield self._pieces(requests, events)
                for task in running:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise true_cause(errors) from errors

    async def _generate(self, request: GenerateRequest) -> Completion:
        async with self._places:
            return await self._generator.generate(request)

    async def _stream(
        self, index: int, request: GenerateRequest, events: asyncio.Queue[_Event]
    ) -> None:
        def wrote(progress: Progress) -> None:
            events.put_nowait((index, progress))

        async with self._places:
            completion = await self._generator.stream(request, wrote)
        events.put_nowait((index, completion))

    async def _pieces(
        self, requests: Sequence[GenerateRequest], events: asyncio.Queue[_Event]
    ) -> AsyncIterator[Piece]:
        """What ``events`` tell, until all answers have ended."""
        answers = [
            StreamedAnswer(i, AnswerText(self.codec.decode, r.params.stop))
            for i, r in enumerate(requests)
        ]
        left = len(answers)
        while left:
            index, event = await events.get()
            if isinstance(event, Completion):
                left -= 1
                yield answers[index].ended(event)
            else:
                yield answers[index].wrote(event)

    def _requests(self, ask: Ask) -> list[GenerateRequest]:
        for prompt in ask.prompts:
            self._check(prompt, ask.params.max_new_tokens)
        return list(self._number(ask))

    def _check(self, prompt: IntArray, new: int) -> None:
        if new > self.room(prompt):
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens; with an answer of at most {new} it exceeds "
                f"the context of {self.max_len}"
            )

    def _number(self, ask: Ask) -> Iterator[GenerateRequest]:
        name = uuid.uuid4().hex
        seed = secrets.randbits(63) if ask.seed is None else ask.seed
        for i in range(ask.answers):
            yield GenerateRequest(
                request_id=f"gateway-{name}-{i}",
                group_id=OUTSIDE_GROUP,
                sibling=i,
                turn=0,
                prompt_ids=ask.prompts[i // ask.n],
                params=ask.params,
                seed=derive(seed, "gateway", i),
            )


def as_prompt(token_ids: Sequence[int]) -> IntArray:
    """Token ids as a request carries them."""
    return np.asarray(token_ids, dtype=np.int64)


def encode_chat(messages: Sequence[Message], codec: TextCodec) -> IntArray:
    """The conversation as the model reads it.

    Raises:
        DataError: the model has no chat template, or the template refuses the messages.
    """
    if not codec.has_chat_template:
        raise DataError(
            f"{codec.model_dir} has no chat template, so it cannot read messages; ask for the "
            "completion of a prompt instead"
        )
    return as_prompt(codec.encode(codec.render_chat(messages)))

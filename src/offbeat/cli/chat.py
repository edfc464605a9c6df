"""``offbeat chat``: a conversation with a model, in a terminal or through a pipe."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli import answering
from offbeat.cli.arguments import Fileroot
from offbeat.errors import DataError, PromptTooLong, true_cause
from offbeat.launch import interrupts

if TYPE_CHECKING:
    from offbeat.data.tokens import TextCodec
    from offbeat.generate.gateway.answers import Answers, Ask
    from offbeat.generate.session import SessionSpec
    from offbeat.types import IntArray, Message, SamplingParams

HELP = (
    "/system TEXT sets the system message and starts over, /reset starts over, /quit or Ctrl-D "
    "leaves; Ctrl-C ends an answer. A line that begins with a space is sent without it."
)
NO_TEMPLATE = (
    "this model has no chat template: it continues each line as it is, and does not remember those "
    "before"
)


def chat(
    checkpoint: answering.Checkpoint,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: answering.MaxTokens = None,
    temperature: answering.Temperature = 1.0,
    top_p: answering.TopP = 1.0,
    top_k: answering.TopK = 0,
    min_p: answering.MinP = 0.0,
    stop: answering.Stop = None,
    seed: answering.Seed = None,
    threads: answering.Threads = None,
    dtype: answering.Format = None,
    device: answering.Device = "auto",
    max_len: answering.MaxLen = None,
    fileroot: Fileroot = Path("runs"),
) -> None:
    """Talk with a model; a model without a chat template continues each line by itself."""
    from offbeat.data.tokens import TextCodec

    folder = answering.model_folder(checkpoint, fileroot)
    _check_system(system, TextCodec.open(folder))
    spec = answering.session_spec(
        folder,
        slots=1,
        threads=threads,
        dtype=dtype,
        device=device,
        max_len=max_len,
    )
    params = answering.sampling(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop=stop
    )
    interrupts.run(_chat(spec, params, max_tokens, seed, system))


def _check_system(system: str | None, codec: TextCodec) -> None:
    if system and not codec.has_chat_template:
        raise DataError(
            f"a system message needs a chat template, and {codec.model_dir} has none; leave it out"
        )


async def _chat(
    spec: SessionSpec,
    params: SamplingParams,
    max_tokens: int | None,
    seed: int | None,
    system: str | None,
) -> None:
    from offbeat.generate.session import open_session

    async with open_session(spec) as session:
        talk = _Conversation(session.answers, params, max_tokens, seed, system)
        if sys.stdin.isatty():
            typer.echo(HELP, err=True)
        if not session.answers.codec.has_chat_template:
            typer.echo(NO_TEMPLATE, err=True)
        lines = _Lines(sys.stdin.fileno())
        while (line := await lines.next()) is not None and line != "/quit":
            await talk.take(line)


class _Conversation:
    """What was said, and how to go on."""

    def __init__(
        self,
        answers: Answers,
        params: SamplingParams,
        max_tokens: int | None,
        seed: int | None,
        system: str | None,
    ) -> None:
        self._answers = answers
        self._params = params
        self._max_tokens = max_tokens
        self._seed = seed
        self._said: list[Message] = []
        self._start(system)

    def _start(self, system: str | None) -> None:
        from offbeat.types import Message

        if system and not self._answers.codec.has_chat_template:
            raise DataError(
                "a system message needs a chat template, which this model does not have"
            )
        self._system = system
        self._said = [Message(role="system", content=system)] if system else []

    async def take(self, line: str) -> None:
        """Do what ``line`` says, or answer it."""
        try:
            if line.startswith("/"):
                self._obey(line)
            elif line.strip():
                await self._answer(line.removeprefix(" "))
        except (PromptTooLong, DataError) as exc:
            typer.echo(f"error: {exc} (/reset starts over)", err=True)

    def _obey(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self._start(self._system)
        elif word == "/system":
            self._start(rest.strip() or None)
        else:
            typer.echo(HELP, err=True)

    async def _answer(self, line: str) -> None:
        from offbeat.types import Message

        asked = Message(role="user", content=line)
        ask = self._ask(self._encode(asked))
        written: list[str] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                with _ended_by_ctrl_c(tasks.create_task(self._write(ask, written))) as writing:
                    await asyncio.wait([writing])
        except BaseExceptionGroup as errors:
            raise true_cause(errors) from errors
        typer.echo()
        self._said += [asked, Message(role="assistant", content="".join(written))]

    def _encode(self, asked: Message) -> IntArray:
        from offbeat.generate.gateway.answers import as_prompt, encode_chat

        codec = self._answers.codec
        if codec.has_chat_template:
            return encode_chat([*self._said, asked], codec)
        return as_prompt(codec.encode_prompt(asked.content))

    def _ask(self, prompt: IntArray) -> Ask:
        from offbeat.generate.gateway.answers import Ask

        room = min(self._answers.room(prompt), answering.DEFAULT_TOKENS)
        params = replace(self._params, max_new_tokens=self._max_tokens or room)
        return Ask(prompts=(prompt,), params=params, seed=self._seed)

    async def _write(self, ask: Ask, written: list[str]) -> None:
        """Print an answer as it comes, and keep it."""
        async with self._answers.pieces(ask) as pieces:
            async for piece in pieces:
                written.append(piece.text)
                typer.echo(answering.shown(piece.text), nl=False)


@contextmanager
def _ended_by_ctrl_c(task: asyncio.Task[None]) -> Iterator[asyncio.Task[None]]:
    """While inside, Ctrl-C cancels ``task`` instead of everything."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield task
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


class _Lines:
    """Lines of a terminal, a pipe or a file, read without a thread that nobody could end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""

    async def next(self) -> str | None:
        """The next line; None at the end."""
        if os.isatty(self._fd):
            typer.echo("> ", nl=False)
        while b"\n" not in self._rest:
            await self._readable()
            data = os.read(self._fd, 1 << 16)
            if not data:
                line, self._rest = self._rest, b""
                return line.decode(errors="replace") if line else None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace")

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        try:
            loop.add_reader(self._fd, ready.set)
        except PermissionError:
            return  # A file: it has its data already.
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._fd)

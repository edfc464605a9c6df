"""``offbeat generate``: answers to prompts from the command line, a file or a pipe."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli import answering
from offbeat.cli.arguments import Fileroot
from offbeat.errors import ConfigError, DataError
from offbeat.launch import interrupts

if TYPE_CHECKING:
    from offbeat.data.tokens import TextCodec
    from offbeat.generate.session import SessionSpec
    from offbeat.types import Completion, IntArray, Message, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A prompt, or the messages of a conversation; ``where`` it was read."""

    where: str
    prompt: str | None = None
    messages: tuple[Message, ...] = ()

    @property
    def shown(self) -> object:
        """As JSON."""
        if self.prompt is not None:
            return self.prompt
        return [{"role": m.role, "content": m.content} for m in self.messages]


def generate(
    checkpoint: answering.Checkpoint,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Default: one per line of standard input."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="JSON lines, each with a `prompt` or with chat `messages`."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask each prompt as a user in the chat template.")
    ] = False,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Answers to each prompt.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per answer.")
    ] = False,
    max_tokens: answering.MaxTokens = None,
    temperature: answering.Temperature = 1.0,
    top_p: answering.TopP = 1.0,
    top_k: answering.TopK = 0,
    min_p: answering.MinP = 0.0,
    stop: answering.Stop = None,
    seed: answering.Seed = None,
    slots: answering.Slots = 16,
    threads: answering.Threads = None,
    dtype: answering.Format = None,
    device: answering.Device = "auto",
    max_len: answering.MaxLen = None,
    fileroot: Fileroot = Path("runs"),
) -> None:
    """Write answers to prompts."""
    from offbeat.data.tokens import TextCodec

    folder = answering.model_folder(checkpoint, fileroot)
    questions = list(_questions(prompts or [], file, chat))
    if not questions:
        raise ConfigError("there is no prompt: give one, or --file, or lines on standard input")
    codec = TextCodec.open(folder)
    encoded = [_encode(q, codec) for q in questions]
    spec = answering.session_spec(
        folder, slots=slots, threads=threads, dtype=dtype, device=device, max_len=max_len
    )
    params = answering.sampling(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop=stop
    )
    completions = interrupts.run(_answer(spec, encoded, params, max_tokens, n, seed))
    for i, completion in enumerate(completions):
        _print(questions[i // n], i % n, completion, as_json=as_json)


def _questions(prompts: Sequence[str], file: Path | None, chat: bool) -> Iterator[_Question]:
    from offbeat.types import Message

    if prompts and file is not None:
        raise ConfigError(f"--file: {file} and a prompt were given; give one of them")
    if file is not None:
        found = _read(file)
    elif prompts:
        found = (_Question(where=f"prompt {i}", prompt=p) for i, p in enumerate(prompts, 1))
    else:
        found = _read_lines()
    for question in found:
        if chat and question.prompt is not None:
            asked = (Message(role="user", content=question.prompt),)
            yield replace(question, prompt=None, messages=asked)
        else:
            yield question


def _read_lines() -> Iterator[_Question]:
    if sys.stdin.isatty():
        typer.echo("one prompt per line; Ctrl-D ends them", err=True)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that are no text get as far as the line that they are in.
        sys.stdin.reconfigure(errors="surrogateescape")
    for number, line in enumerate(sys.stdin, 1):
        if line.strip():
            yield _Question(where=f"line {number}", prompt=line.rstrip("\n"))


def _read(file: Path) -> Iterator[_Question]:
    """The rows of a JSON-lines file."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(f"--file: {file} cannot be read: {exc}") from exc
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _row(line, f"{file}:{number}")


def _row(line: str, where: str) -> _Question:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as exc:
        raise DataError(f"{where}: not JSON: {exc}") from exc
    if not isinstance(row, dict):
        raise DataError(f"{where}: must be a JSON object, got {type(row).__name__}")
    asked = row.get("messages", row.get("prompt"))
    if isinstance(asked, str):
        return _Question(where=where, prompt=asked)
    if isinstance(asked, list) and asked:
        return _Question(where=where, messages=tuple(_message(m, where) for m in asked))
    raise DataError(
        f"{where}: has neither a text `prompt` nor a list `messages`; its columns are "
        f"{', '.join(row) or 'none'}"
    )


def _message(value: object, where: str) -> Message:
    from offbeat.types import Message

    if isinstance(value, dict):
        role, content = value.get("role"), value.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return Message(role=role, content=content)
    raise DataError(f"{where}: a message needs a text `role` and a text `content`, got {value!r}")


async def _answer(
    spec: SessionSpec,
    prompts: Sequence[IntArray],
    params: SamplingParams,
    max_tokens: int | None,
    n: int,
    seed: int | None,
) -> list[Completion]:
    from offbeat.generate.gateway.answers import Ask
    from offbeat.generate.session import open_session

    async with open_session(spec) as session:
        answers = session.answers
        room = min(map(answers.room, prompts))
        longest = min(room, answering.DEFAULT_TOKENS) if max_tokens is None else max_tokens
        params = replace(params, max_new_tokens=longest)
        return await answers.whole(Ask(prompts=tuple(prompts), params=params, n=n, seed=seed))


def _encode(question: _Question, codec: TextCodec) -> IntArray:
    from offbeat.generate.gateway.answers import as_prompt, encode_chat

    try:
        if question.prompt is None:
            return encode_chat(question.messages, codec)
        ids = codec.encode_prompt(question.prompt)
    except DataError as exc:
        raise DataError(f"{question.where}: {exc}") from exc
    if not ids:
        raise DataError(f"{question.where}: {question.prompt!r} has no tokens")
    return as_prompt(ids)


def _print(question: _Question, index: int, completion: Completion, *, as_json: bool) -> None:
    if not as_json:
        typer.echo(answering.shown(completion.text))
        return
    answer = {
        "prompt": question.shown,
        "index": index,
        "text": completion.text,
        "finish_reason": completion.stop_reason.value,
        "token_ids": completion.token_ids.tolist(),
        "logprobs": completion.logprobs.tolist(),
    }
    typer.echo(json.dumps(answer))

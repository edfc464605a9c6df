"""Text to token ids and back, and chat templates, without torch and without transformers.

Owns reading a model folder's tokenizer files. Gives what transformers' ``AutoTokenizer`` gives for
a folder with a ``tokenizer.json``; knows nothing of rows, prompts or models. Immutable after
``open``; safe to share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from offbeat.errors import DataError, ModelError, boundary
from offbeat.types import Message

_Json: TypeAlias = Mapping[str, object]

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The special tokens that chat templates may use by name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextCodec:
    """The tokenizer of one model folder; build it with ``open``.

    ``eos_token_ids`` ends an answer: what generation_config.json, config.json and
    tokenizer_config.json name, in this order, each id once; empty when none does. ``vocab_size``
    counts added tokens. ``context_length`` is the most tokens the model was made for, None when
    config.json does not say.
    """

    model_dir: Path
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    context_length: int | None
    _tokenizer: Tokenizer
    _template: jinja2.Template | None
    _named_tokens: Mapping[str, str]

    @classmethod
    def open(cls, model_dir: str | Path) -> TextCodec:
        """Read the tokenizer files of ``model_dir``.

        Raises:
            ModelError: no ``tokenizer.json``, or a file that cannot be read.
        """
        folder = Path(model_dir).expanduser()
        tokenizer = _read_tokenizer(folder)
        settings = _read_json(folder / "tokenizer_config.json")
        named = _named_tokens(_read_json(folder / "special_tokens_map.json"), settings)
        return cls(
            model_dir=folder,
            eos_token_ids=_eos_ids(folder, tokenizer, named),
            vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
            context_length=_context_length(folder),
            _tokenizer=tokenizer,
            _template=_read_template(folder, settings),
            _named_tokens=named,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render_chat`` works."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, nothing added; special tokens spelled out in it count.

        Raises:
            DataError: ``text`` is no Unicode text; names the character.
        """
        return self._ids(text, special=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of ``text`` with the special tokens that tokenizer.json puts around a text.

        ``add_bos_token`` and ``add_eos_token`` of tokenizer_config.json do not count, as in
        transformers when there is a tokenizer.json.

        Raises:
            DataError: ``text`` is no Unicode text; names the character.
        """
        return self._ids(text, special=True)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise DataError(_half_character(text, exc.start)) from exc
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, special tokens skipped."""
        # The tokenizer takes plain integers only, and ids come as numpy arrays.
        text: str = self._tokenizer.decode([int(i) for i in token_ids], skip_special_tokens=True)
        return text

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the model reads it.

        Its special tokens are spelled out, so ``encode`` is the way to its ids.

        Raises:
            DataError: the model has no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise DataError(f"{self.model_dir} has no chat template, so it cannot read messages")
        with boundary(DataError, f"chat template of {self.model_dir}"):
            return self._template.render(
                messages=[{"role": m.role, "content": m.content} for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._named_tokens,
            )


def _half_character(text: str, place: int) -> str:
    """What is wrong with ``text`` at ``place``, where it has a surrogate."""
    code = ord(text[place])
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte that it could not decode
        found = f"the byte 0x{code - 0xDC00:02x}, which is not UTF-8"
    else:
        found = f"U+{code:04X}, which is half of a character"
    return f"character {place + 1} of the text is {found}: a model reads Unicode text only"


def _read_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json; save the tokenizer in that format "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    with boundary(ModelError, f"reading {file}"):
        tokenizer = Tokenizer.from_file(str(file))
    # A saved file may cut or pad every text; a prompt must be neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(file: Path) -> _Json:
    """The object in ``file``; empty when there is no such file."""
    if not file.is_file():
        return {}
    with boundary(ModelError, f"reading {file}"):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


def _named_tokens(*sources: _Json) -> dict[str, str]:
    """Content of each named special token; later sources win."""
    named = {}
    for source in sources:
        for name in _NAMED_TOKENS:
            value = source.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                named[name] = content
    return named


def _context_length(folder: Path) -> int | None:
    value = _read_json(folder / "config.json").get("max_position_embeddings")
    return value if isinstance(value, int) else None


def _eos_ids(folder: Path, tokenizer: Tokenizer, named: Mapping[str, str]) -> tuple[int, ...]:
    ids: list[int] = []
    for file in (folder / "generation_config.json", folder / "config.json"):
        value = _read_json(file).get("eos_token_id")
        given = value if isinstance(value, list) else [] if value is None else [value]
        for index in given:
            if not isinstance(index, int) or isinstance(index, bool):
                raise ModelError(
                    f"{file}: eos_token_id must be an integer or a list, got {value!r}"
                )
            ids.append(index)
    if "eos_token" in named:
        index = tokenizer.token_to_id(named["eos_token"])
        ids += [] if index is None else [index]
    return tuple(dict.fromkeys(ids))


def _read_template(folder: Path, settings: _Json) -> jinja2.Template | None:
    file = folder / "chat_template.jinja"
    source: object
    if file.is_file():
        where = str(file)
        source = file.read_text(encoding="utf-8")
    else:
        where = f"chat_template of {folder / 'tokenizer_config.json'}"
        source = settings.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"{where} must be text, got {type(source).__name__}")
    with boundary(ModelError, f"compiling {where}"):
        return _environment().from_string(source)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}``: marks the assistant's part, passed through."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What templates of model folders may use; they are somebody else's code, hence the sandbox."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

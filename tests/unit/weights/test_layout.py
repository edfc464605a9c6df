"""The layout is a valid safetensors file and a function of the set of tensors."""

from __future__ import annotations

import pytest
from safetensors import numpy as safetensors_numpy

from offbeat.weights.layout import ITEM_BYTES, TensorSpec, digest_of, lay_out, read_layout

SPECS = [
    TensorSpec(name="b", dtype="BF16", shape=(3,)),
    TensorSpec(name="a", dtype="F32", shape=(2, 3)),
    TensorSpec(name="flag", dtype="BOOL", shape=()),
    TensorSpec(name="none", dtype="F32", shape=(0, 4)),
]


def test_layout_does_not_depend_on_the_order_given() -> None:
    assert lay_out(SPECS) == lay_out(reversed(SPECS))


def test_every_tensor_is_aligned_to_its_element_size() -> None:
    for placed in lay_out(SPECS).tensors:
        assert placed.start % ITEM_BYTES[placed.spec.dtype] == 0


def test_reading_a_laid_out_header_gives_the_same_layout() -> None:
    layout = lay_out(SPECS)
    content = layout.header + bytes(layout.nbytes - len(layout.header))
    assert read_layout(content) == layout


def test_safetensors_accepts_the_file() -> None:
    specs = [spec for spec in SPECS if spec.dtype != "BF16"]  # numpy has no bfloat16
    layout = lay_out(specs)
    tensors = safetensors_numpy.load(layout.header + bytes(layout.nbytes - len(layout.header)))
    assert {name: t.shape for name, t in tensors.items()} == {s.name: s.shape for s in specs}


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([SPECS[0], SPECS[0]], "'b' is given twice"),
        ([TensorSpec(name="q", dtype="torch.qint8", shape=(1,))], "'q': dtype torch.qint8"),
    ],
)
def test_tensors_that_cannot_be_named_in_a_file_are_refused(
    specs: list[TensorSpec], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        lay_out(specs)


@pytest.mark.parametrize("keep", [0, 5, 40])
def test_torn_header_is_refused(keep: int) -> None:
    with pytest.raises(ValueError, match="header"):
        read_layout(lay_out(SPECS).header[:keep])


def test_file_without_its_last_byte_is_refused_by_tensor_name() -> None:
    layout = lay_out([SPECS[1]])
    with pytest.raises(ValueError, match="'a' does not fit"):
        read_layout(layout.header + bytes(23))


def test_digest_of_parts_is_the_digest_of_the_whole() -> None:
    assert digest_of(b"ab", bytearray(b"c"), memoryview(b"d")) == digest_of(b"abcd")
    assert digest_of(b"abcd") != digest_of(b"abce")

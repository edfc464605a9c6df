"""What msgpack does to the types that travel."""

import numpy as np
import pytest

from offbeat.errors import WorkerError
from offbeat.launch.codec import check, decode, encode
from offbeat.types import (
    BlobRef,
    BoolArray,
    Completion,
    FloatArray,
    GenerateRequest,
    GeneratorStats,
    GroupId,
    IntArray,
    PolicyVersion,
    Prompt,
    Rollout,
    SamplingParams,
    StepReport,
    StopReason,
    TrainSample,
    WeightUpdate,
)


def same(a: object, b: object) -> bool:
    """Equality that looks into arrays, dtype and shape included."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and bool(
            np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        )  # fmt: skip
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dataclass_fields__"):
        fields = a.__dataclass_fields__
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in fields)
    return type(a) is type(b) and a == b


def request(n: int) -> GenerateRequest:
    params = SamplingParams(stop=("\n", "x"), stop_token_ids=(1, 2), top_k=5)
    return GenerateRequest(
        request_id="r", group_id=GroupId(-1), sibling=2, turn=0, prompt_ids=np.arange(n),
        params=params, seed=2**64 - 1,
    )  # fmt: skip


def completion(n: int) -> Completion:
    return Completion(
        token_ids=np.arange(n), logprobs=np.full(n, -np.inf, np.float32), versions=np.arange(n),
        stop_reason=StopReason.STOP, text="é\ud83d".encode("utf-8", "replace").decode(),
    )  # fmt: skip


def sample(n: int) -> TrainSample:
    return TrainSample(
        group_id=GroupId(3), sibling=1, tokens=np.arange(n), loss_mask=np.arange(n) % 2 == 0,
        behave_logp=np.linspace(-3, 0, n, dtype=np.float32), versions=np.arange(n) - 1,
        reward=0.1, truncated=True,
    )  # fmt: skip


VALUES = [
    (request(5), GenerateRequest),
    (request(0), GenerateRequest),
    (completion(4), Completion),
    (completion(0), Completion),
    (SamplingParams(), SamplingParams),
    (WeightUpdate(version=PolicyVersion(2), uri="/x", nbytes=3, digest="ab"), WeightUpdate),
    (BlobRef(uri="/proc/1/fd/3", nbytes=0, digest=""), BlobRef),
    (StepReport(version=PolicyVersion(1), tokens=9, rows=2, started=0.25, ended=1.5,
                metrics={"loss/nats": float("inf"), "a": 0.0}), StepReport),
    (GeneratorStats(version=PolicyVersion(1), slots=4, running=1, waiting=0, prefill_tokens=5,
                    decode_tokens=6, finished=7, aborted=0, paused=False, peak_rss_bytes=2**40,
                    decode_spans=((0.5, 1.0), (1.5, 2.0))), GeneratorStats),
    ([sample(6), sample(0), sample(1)], list[TrainSample]),
    (Prompt(group_id=GroupId(1), epoch=0, row=2, token_ids=np.arange(2), text="t",
            columns={"n": 3, "s": "x", "l": [1, 2]}), Prompt),
    (3, int), (-0.5, float), ("text", str), ([1, 2], list[int]), (None, type(None)),
]  # fmt: skip


@pytest.mark.parametrize(("value", "target"), VALUES, ids=lambda v: getattr(v, "__name__", None))
def test_every_travelling_type_comes_back_equal(value: object, target: type[object]) -> None:
    assert same(decode(encode(value), target), value)


@pytest.mark.parametrize(
    ("array", "target"),
    [
        (np.zeros((2, 3, 4), np.float32), FloatArray),
        (np.arange(12).reshape(3, 4).T, IntArray),
        (np.arange(10)[::-3], IntArray),
        (np.zeros((0, 3), bool), BoolArray),
        (np.array(5), IntArray),
        (np.array([1.5, np.nan]), np.ndarray),
    ],
)
def test_arrays_of_any_shape_and_stride_come_back_equal(
    array: np.ndarray, target: type[np.ndarray]
) -> None:
    assert same(decode(encode(array), target), array)


def test_decoded_arrays_are_read_only() -> None:
    array = decode(encode(np.arange(3)), IntArray)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_numpy_scalars_travel_as_plain_numbers() -> None:
    data = encode({"a": np.float32(0.5), "b": np.float64(2.5), "c": np.int64(3)})
    assert decode(data, dict[str, float]) == {"a": 0.5, "b": 2.5, "c": 3.0}


def test_an_array_of_another_dtype_is_refused_by_field_name() -> None:
    wide = Completion(
        token_ids=np.arange(2), logprobs=np.zeros(2), versions=np.arange(2),
        stop_reason=StopReason.STOP, text="",
    )  # fmt: skip
    with pytest.raises(WorkerError, match=r"expected an array of float32, got float64.*logprobs"):
        decode(encode(wide), Completion)


def test_objects_and_foreign_types_are_refused_when_sent() -> None:
    with pytest.raises(WorkerError, match="dtype object cannot travel"):
        encode(np.array([object()]))
    with pytest.raises(WorkerError, match="function"):
        encode([test_decoded_arrays_are_read_only])


@pytest.mark.parametrize(
    "wire",
    [
        ["|O", [1], b"12345678"],
        ["<i8", [2], b"12345678"],
        ["<i8", [-1], b"12345678"],
        ["<i8", [2**40, 2**40], b""],
        ["<i8", ["1"], b"12345678"],
        ["nonsense", [1], b"12345678"],
        ["<M8[s]", [1], b"12345678"],
        [1, 2, 3],
        "text",
    ],
)
def test_malformed_arrays_are_refused(wire: object) -> None:
    with pytest.raises(WorkerError, match="received bytes are not"):
        decode(encode(wire), IntArray)


def test_bytes_that_are_not_the_type_name_the_type() -> None:
    with pytest.raises(WorkerError, match="not a StepReport"):
        decode(encode({"version": 1}), StepReport)
    with pytest.raises(WorkerError, match="not a BlobRef"):
        decode(b"\xc1", BlobRef)


def test_a_union_of_dataclasses_is_refused_before_it_travels() -> None:
    with pytest.raises(TypeError, match="Scored"):
        check(Rollout)


def test_invariants_of_a_type_are_checked_on_arrival() -> None:
    wire = {
        "token_ids": np.arange(2), "logprobs": np.zeros(1, np.float32), "versions": np.arange(2),
        "stop_reason": "stop", "text": "",
    }  # fmt: skip
    with pytest.raises(WorkerError, match="differ in length"):
        decode(encode(wire), Completion)

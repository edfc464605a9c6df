"""msgpack for typed values: how an object becomes bytes between two processes, and back.

Owns the wire form of numpy arrays; everything else is msgspec's own msgpack. Knows no sockets and
no workers. An array travels as ``[dtype, shape, raw bytes]``, C order. Nothing here can run code
from the other side: there is no pickle, object arrays are refused both ways, and a value that does
not fit the expected type is an error.

Unions of two dataclasses (``Scored | Invalid``) have no tag on the wire: ``check`` refuses them.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from offbeat.errors import WorkerError

T = TypeVar("T")

PLAIN_KINDS = "biufc"
"""numpy kinds that are nothing but numbers: bool, signed, unsigned, float, complex."""


def encode(obj: object) -> bytes:
    """``obj`` as msgpack.

    Raises:
        WorkerError: something inside is of a type that cannot travel; names the type.
    """
    try:
        return _ENCODER.encode(obj)
    except (TypeError, OverflowError, ValueError) as exc:
        raise WorkerError(f"a {type(obj).__name__} cannot be sent: {exc}") from exc


def decode(data: bytes | memoryview, target: type[T]) -> T:
    """The ``target`` that ``encode`` wrote.

    Arrays are read-only views of the received bytes; copy one to write to it.

    Raises:
        WorkerError: the bytes are not msgpack, or not a ``target``; names the field.
    """
    try:
        return cast(T, _decoder(cast(Hashable, target)).decode(data))
    except (msgspec.ValidationError, msgspec.DecodeError) as exc:
        raise WorkerError(f"received bytes are not a {_name(target)}: {exc}") from exc


def check(target: Hashable) -> None:
    """Refuse a type that cannot travel, before the first value of it does.

    Raises:
        TypeError: ``target`` cannot be decoded, for example a union of two dataclasses.
    """
    _decoder(target)


def _to_wire(obj: object) -> object:
    if isinstance(obj, np.generic):
        return obj.item()
    if isinstance(obj, np.ndarray):
        if obj.dtype.kind not in PLAIN_KINDS:
            raise TypeError(f"an array of dtype {obj.dtype} cannot travel, only plain numbers")
        return (obj.dtype.str, obj.shape, obj.tobytes())
    raise TypeError(f"type {type(obj).__name__} is not supported")


def _from_wire(target: type, obj: object) -> object:
    if target is object:
        return obj
    if target is np.ndarray or typing.get_origin(target) is np.ndarray:
        return _array(target, obj)
    raise TypeError(f"type {_name(target)} is not supported")


def _array(target: object, obj: object) -> np.ndarray[Any, Any]:
    match obj:
        case [str() as code, [*shape], bytes() as raw] if all(isinstance(n, int) for n in shape):
            lengths = tuple(cast("list[int]", shape))
        case _:
            raise ValueError("expected an array as [dtype, shape, bytes]")
    dtype = np.dtype(code)
    if dtype.kind not in PLAIN_KINDS:
        raise ValueError(f"an array of dtype {dtype} cannot travel, only plain numbers")
    wanted = _dtype_of(target)
    if wanted is not None and dtype != wanted:
        raise ValueError(f"expected an array of {wanted}, got {dtype}")
    if min(lengths, default=0) < 0 or dtype.itemsize * math.prod(lengths) != len(raw):
        raise ValueError(f"{len(raw)} bytes do not make an array {dtype}{list(lengths)}")
    return np.ndarray(lengths, dtype, raw)


def _dtype_of(target: object) -> np.dtype[Any] | None:
    """The dtype that ``NDArray[dtype]`` asks for; None where any will do."""
    for arg in typing.get_args(target):
        if typing.get_origin(arg) is np.dtype:
            scalar = typing.get_args(arg)[0]
            return np.dtype(scalar) if isinstance(scalar, type) else None
    return None


def _name(target: object) -> str:
    return getattr(target, "__name__", None) or str(target)


@lru_cache(maxsize=256)
def _decoder(target: Hashable) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(cast("type[Any]", target), dec_hook=_from_wire)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_wire)

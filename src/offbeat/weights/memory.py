"""Weights through shared memory of one machine: one writer, many readers, nothing left behind.

Owns a memfd that holds a safetensors file, laid out once and overwritten in place by every
``publish``, and its readers' mappings. Knows no models, and not which version is live: that is the
controller's business.

    trainer     MemoryPublisher.publish(v) ──► WeightUpdate(uri="/proc/<pid>/fd/<n>", digest)
    generator   MemorySubscriber.stage(update)  in any thread, while decoding goes on
                MemorySubscriber.commit(v)      between two forward passes

The memory has no name in the file system: the kernel frees it with its last holder, also after
SIGKILL.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch

from offbeat.errors import WeightSyncError, boundary
from offbeat.types import PolicyVersion, WeightUpdate
from offbeat.weights.layout import Layout, Placed, TensorSpec, digest_of, lay_out, read_layout

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def _specs(params: Iterable[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
    return [
        TensorSpec(name=name, dtype=_CODES.get(p.dtype, str(p.dtype)), shape=tuple(p.shape))
        for name, p in params
    ]


def _view(memory: mmap.mmap, placed: Placed) -> torch.Tensor:
    dtype, shape, nbytes = DTYPES[placed.spec.dtype], placed.spec.shape, placed.spec.nbytes
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)  # frombuffer refuses a count of 0
    count = nbytes // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=placed.start).view(shape)


def _views(memory: mmap.mmap, layout: Layout) -> dict[str, torch.Tensor]:
    return {placed.spec.name: _view(memory, placed) for placed in layout.tensors}


def digest_of_params(params: Mapping[str, torch.Tensor]) -> str:
    """The digest that a publisher of exactly these tensors would announce."""
    layout = lay_out(_specs(params.items()))
    filled = (placed.spec.name for placed in layout.tensors if placed.spec.nbytes)
    rows = (params[name].detach() for name in filled)
    raw = (row.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data for row in rows)
    return digest_of(layout.header, *raw)


class MemoryPublisher:
    """Writes the live parameters into one shared buffer.

    The buffer is single: call ``publish`` again only after every reader of the previous update has
    committed it or finished copying it. A reader that stages too late is refused by the digest; one
    that is between its ``stage`` and its ``commit`` is protected by this rule alone.

    Example:
        >>> publisher = MemoryPublisher(model.named_parameters())  # a tied weight comes once
        >>> update = publisher.publish(PolicyVersion(1))
    """

    def __init__(self, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        pairs = list(params)
        self._layout = lay_out(_specs(pairs))
        self._params = dict(pairs)
        self._fd = os.memfd_create("offbeat-weights")
        try:
            # Reserves the pages now: without room we are refused here, not killed at a write.
            os.posix_fallocate(self._fd, 0, self._layout.nbytes)
            # The pages fault in now: the first copy costs what every other one does.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._memory = mmap.mmap(self._fd, self._layout.nbytes, flags=flags)
        except OSError as exc:
            os.close(self._fd)
            raise WeightSyncError(
                f"no shared memory for {self._layout.nbytes} bytes of weights: {exc}"
            ) from exc
        self._memory[: len(self._layout.header)] = self._layout.header
        self._buffer = _views(self._memory, self._layout)
        self._open = True

    def publish(self, version: PolicyVersion) -> WeightUpdate:
        """Copy the live parameters into the buffer and announce them as ``version``.

        Raises:
            WeightSyncError: closed, or a parameter changed its shape or dtype since construction.
        """
        self.fill(version)
        return self.announce(version)

    def fill(self, version: PolicyVersion) -> None:
        """Copy the live parameters, which are ``version``, into the buffer. Raises as
        ``publish``.
        """
        if not self._open:
            raise WeightSyncError(f"publish of version {version}: the publisher is closed")
        with torch.no_grad():
            for name, target in self._buffer.items():
                _require_same(name, self._params[name], target)
            for name, target in self._buffer.items():
                target.copy_(self._params[name])

    def announce(self, version: PolicyVersion) -> WeightUpdate:
        """Where the buffer is, as ``version``, and its digest."""
        with memoryview(self._memory) as content:
            digest = digest_of(content)
        return WeightUpdate(
            version=version,
            uri=f"/proc/{os.getpid()}/fd/{self._fd}",
            nbytes=self._layout.nbytes,
            digest=digest,
        )

    def close(self) -> None:
        """Give the memory up; readers keep what they have mapped. May be called twice."""
        if self._open:
            self._open = False
            self._buffer.clear()  # views must go before the mapping they point into
            self._memory.close()
            os.close(self._fd)

    def __enter__(self) -> MemoryPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _require_same(name: str, live: torch.Tensor, laid_out: torch.Tensor) -> None:
    if live.shape != laid_out.shape or live.dtype != laid_out.dtype:
        raise WeightSyncError(
            f"tensor {name!r} is {live.dtype} {tuple(live.shape)}, "
            f"the buffer was laid out for {laid_out.dtype} {tuple(laid_out.shape)}"
        )


class LiveWeights(Protocol):
    """The weights of a model in use, and how new ones get into it."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Shape and dtype of every weight by its published name; values may be missing (meta)."""

    @property
    def reads_late(self) -> bool:
        """Whether the action of ``stage`` reads the tensors; else they go before it runs."""

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Prepare to take ``tensors`` over, the live weights untouched; the action does it.

        May run while the model computes; the action never does, and is short. ``tensors`` has the
        names and shapes of ``self.tensors``.
        """

    def read(self) -> Mapping[str, torch.Tensor]:
        """Every weight with its values as they are now."""


class Parameters:
    """Live weights that are ordinary tensors: everything is copied into them by the action."""

    reads_late = True

    def __init__(self, params: Mapping[str, torch.Tensor]) -> None:
        self._params = dict(params)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._params

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        def copy() -> None:
            with torch.no_grad():
                for name, source in tensors.items():
                    self._params[name].copy_(source)

        return copy

    def read(self) -> Mapping[str, torch.Tensor]:
        return self._params


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    version: PolicyVersion
    memory: mmap.mmap
    views: dict[str, torch.Tensor]
    take_over: Callable[[], None]

    def release(self) -> None:
        _unmap(self.memory, self.views)


def _unmap(memory: mmap.mmap, views: dict[str, torch.Tensor]) -> None:
    views.clear()  # views must go before the mapping they point into
    memory.close()


class MemorySubscriber:
    """Brings published weights into live ones.

    ``stage`` may run in another thread than ``commit``; one update is staged at a time. The file's
    dtype may differ from the live weight's as long as both are floating point.

    Args:
        weights: the live weights; parameters by name are copied into in place, by ``commit``.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor] | LiveWeights) -> None:
        self._live = Parameters(weights) if isinstance(weights, Mapping) else weights
        self._staged: _Staged | None = None
        self._lock = threading.Lock()  # guards the swap of _staged only

    def stage(self, update: WeightUpdate) -> None:
        """Map ``update``, prove that it is what was announced and fits, prepare the live weights.

        Replaces what was staged.

        Raises:
            WeightSyncError: gone, torn, of another digest, or a tensor that does not match.
        """
        # Dropped first: both lie in one buffer, so the older one is overwritten by now.
        self.discard()
        with boundary(WeightSyncError, f"stage version {update.version} from {update.uri}"):
            staged = self._open(update)
        with self._lock:
            previous, self._staged = self._staged, staged
        if previous is not None:
            previous.release()

    def _open(self, update: WeightUpdate) -> _Staged:
        memory = _map(update)
        views: dict[str, torch.Tensor] = {}
        try:
            with memoryview(memory) as content:
                # Reading every byte also faults every page in, so that commit is a plain copy.
                digest = digest_of(content)
                if digest != update.digest:
                    raise WeightSyncError(
                        f"weights of version {update.version} have digest {digest}, "
                        f"announced was {update.digest}"
                    )
                layout = read_layout(content)
            self._require_match(layout)
            views |= _views(memory, layout)
            take_over = self._live.stage(views)
            if not self._live.reads_late:
                # Here and not in commit: to unmap a large file takes as long as a fast swap.
                _unmap(memory, views)
        except BaseException:
            # The error's traceback may hold one more view: the mapping goes with it then.
            with suppress(BufferError):
                _unmap(memory, views)
            raise
        return _Staged(version=update.version, memory=memory, views=views, take_over=take_over)

    def _require_match(self, layout: Layout) -> None:
        specs = {placed.spec.name: placed.spec for placed in layout.tensors}
        tensors = self._live.tensors
        for name in sorted(specs.keys() ^ tensors.keys()):
            where = "is published but unknown here" if name in specs else "is not published"
            raise WeightSyncError(f"tensor {name!r} {where}")
        for name, spec in specs.items():
            live, dtype = tensors[name], DTYPES[spec.dtype]
            convertible = dtype.is_floating_point and live.dtype.is_floating_point
            if tuple(live.shape) != spec.shape or not (dtype == live.dtype or convertible):
                raise WeightSyncError(
                    f"tensor {name!r} is published as {dtype} {spec.shape}, "
                    f"here it is {live.dtype} {tuple(live.shape)}"
                )

    def commit(self, version: PolicyVersion) -> None:
        """Make the staged weights the live ones and let the mapping go.

        The caller makes sure that no forward pass runs.

        Raises:
            WeightSyncError: ``version`` is not what is staged.
        """
        with self._lock:
            staged = self._staged
            if staged is None or staged.version != version:
                held = "nothing" if staged is None else f"version {staged.version}"
                raise WeightSyncError(f"commit of version {version}: {held} is staged")
            self._staged = None
        try:
            staged.take_over()
        finally:
            staged.release()

    def digest_of_live(self) -> str:
        """Digest of the live weights; equals the committed update's when every dtype agrees."""
        return digest_of_params(self._live.read())

    def discard(self) -> None:
        """Let go of what is staged, if anything."""
        with self._lock:
            staged, self._staged = self._staged, None
        if staged is not None:
            staged.release()

    close = discard


def _map(update: WeightUpdate) -> mmap.mmap:
    fd = os.open(update.uri, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size != update.nbytes:
            raise WeightSyncError(
                f"weights of version {update.version} have {size} bytes, "
                f"announced were {update.nbytes}"
            )
        # Writable (and private) only because torch warns about read-only buffers.
        return mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)

"""What each slot's request wrote, where it is, and how it samples.

Owns one row of plain arrays per slot, on the host: a step's bookkeeping is a handful of array
operations, whatever the number of requests. Knows no model and no keys; its only tensors are the
sampling options, where sampling needs them.

Shapes: C slots, A answer tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offbeat.generate.engine.sampler import SamplingRows
from offbeat.types import BoolArray, FloatArray, GenerateRequest, IntArray

_SEED_BITS = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Slots that met a stop id, and slots that are full, after a token was written."""

    stopped: IntArray
    full: IntArray


class SlotRows:
    """One row per slot. ``decoding`` [C]: the slot takes part in the next decode pass.

    A row that does not decode feeds token 0 at position 0 and is ignored.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self.decoding: BoolArray = np.zeros(slots, dtype=np.bool_)
        self.prompt_len: IntArray = np.zeros(slots, dtype=np.int64)
        self.written: IntArray = np.zeros(slots, dtype=np.int64)
        self.has_stops: BoolArray = np.zeros(slots, dtype=np.bool_)
        self._last: IntArray = np.zeros(slots, dtype=np.int64)
        self._limit: IntArray = np.zeros(slots, dtype=np.int64)
        self._seed: IntArray = np.zeros(slots, dtype=np.int64)
        self._temperature: FloatArray = np.ones(slots, dtype=np.float32)
        self._top_p: FloatArray = np.ones(slots, dtype=np.float32)
        self._top_k: IntArray = np.zeros(slots, dtype=np.int64)
        self._min_p: FloatArray = np.zeros(slots, dtype=np.float32)
        self._truncated: BoolArray = np.zeros(slots, dtype=np.bool_)
        self._stop_ids: IntArray = np.full((slots, 4), -1, dtype=np.int64)
        self._tokens: IntArray = np.zeros((slots, 128), dtype=np.int64)
        self._logp: FloatArray = np.zeros((slots, 128), dtype=np.float32)

    # Joining and leaving

    def start(self, slot: int, request: GenerateRequest, stop_ids: tuple[int, ...]) -> None:
        """Fill the row of ``slot`` for a new request, which does not decode yet."""
        params = request.params
        self._reserve(params.max_new_tokens, len(stop_ids))
        self.decoding[slot] = False
        self.prompt_len[slot] = len(request.prompt_ids)
        self.written[slot] = 0
        self.has_stops[slot] = bool(params.stop)
        self._limit[slot] = params.max_new_tokens
        self._seed[slot] = np.uint64(request.seed & _SEED_BITS).astype(np.int64)
        self._temperature[slot] = params.temperature
        self._top_p[slot] = params.top_p
        self._top_k[slot] = params.top_k
        self._min_p[slot] = params.min_p
        self._truncated[slot] = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(stop_ids)] = stop_ids

    def end(self, slot: int) -> None:
        """``slot`` does not decode any more, and what it wrote is gone."""
        self.decoding[slot] = False
        self._last[slot] = 0
        self.written[slot] = 0

    def suspend(self) -> None:
        """No slot decodes until ``append`` writes its next token."""
        self.decoding[:] = False

    def renumber(self, order: IntArray) -> None:
        """Row i becomes what row ``order[i]`` was."""
        moved = np.flatnonzero(order != np.arange(len(order)))
        for rows in (
            self.decoding,
            self.prompt_len,
            self.written,
            self.has_stops,
            self._last,
            self._limit,
            self._seed,
            self._temperature,
            self._top_p,
            self._top_k,
            self._min_p,
            self._truncated,
            self._stop_ids,
            self._tokens,
            self._logp,
        ):
            rows[moved] = rows[order[moved]]

    # One step

    @property
    def extent(self) -> int:
        """Slots 0..extent-1 hold all that decode."""
        decoding = np.flatnonzero(self.decoding)
        return int(decoding[-1]) + 1 if len(decoding) else 0

    def lengths(self, n: int) -> IntArray:
        """Keys that each of the first ``n`` rows sees, its newest token's included; else 0."""
        length = self.prompt_len[:n] + self.written[:n]
        return np.where(self.decoding[:n], length, 0)

    def newest(self, n: int) -> IntArray:
        """The token that each of the first ``n`` rows feeds next."""
        return self._last[:n]

    def sampling(
        self, rows: IntArray | slice, needed: IntArray
    ) -> tuple[SamplingRows, Tensor, Tensor]:
        """Sampling options, seeds and answer positions of ``rows``, of which ``needed`` count."""
        hot, cut = self._temperature[needed], self._truncated[needed]
        options = SamplingRows(
            temperature=self._send(self._temperature[rows]),
            top_p=self._send(self._top_p[rows]),
            top_k=self._send(self._top_k[rows]),
            min_p=self._send(self._min_p[rows]),
            truncated=bool(cut.any()),
            greedy=bool((hot <= 0).any()),
            scaled=bool((hot != 1).any()),
        )
        return options, self._send(self._seed[rows]), self._send(self.written[rows])

    def append(self, slots: IntArray, tokens: IntArray, logp: FloatArray) -> Ended:
        """Write one token to each of ``slots``; they decode from now on."""
        place = self.written[slots]
        self._tokens[slots, place] = tokens
        self._logp[slots, place] = logp
        self._last[slots] = tokens
        self.written[slots] = place + 1
        self.decoding[slots] = True
        stopped = (tokens[:, None] == self._stop_ids[slots]).any(1)
        return Ended(stopped=slots[stopped], full=slots[place + 1 >= self._limit[slots]])

    def tokens(self, slot: int) -> IntArray:
        """What the row wrote, until the next step."""
        return self._tokens[slot, : self.written[slot]]

    def answer(self, slot: int, begin: int = 0) -> tuple[IntArray, FloatArray]:
        """Copies of what the row wrote from token ``begin`` on: token ids and log-probs."""
        n = self.written[slot]
        return self._tokens[slot, begin:n].copy(), self._logp[slot, begin:n].copy()

    def _reserve(self, answer: int, stop_ids: int) -> None:
        """Make room for answers and stop ids of these numbers."""
        have = self._tokens.shape[1]
        if answer > have:
            pad = ((0, 0), (0, max(answer, 2 * have) - have))
            self._tokens, self._logp = np.pad(self._tokens, pad), np.pad(self._logp, pad)
        grow = stop_ids - self._stop_ids.shape[1]
        if grow > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, grow)), constant_values=-1)

    def _send(self, rows: IntArray | FloatArray) -> Tensor:
        return torch.from_numpy(rows).to(self._device)

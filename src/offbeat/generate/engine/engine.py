"""The engine's core: requests in, completions out, one ``step`` at a time.

Owns slots, the waiting line, the per-slot token rows and the weights' version. Synchronous and
single-threaded: whoever drives it (``generate/server.py``) calls everything from one thread, so a
weight swap and a forward pass can never overlap.

A step first admits waiting requests to free slots (prefill), then runs one decode pass over all
running ones. A prompt is computed once: a request whose prompt lies in a slot already, under the
present weights, copies it from there. Everything a token depends on (its slot's keys, its own
random stream) is private to its request, so tokens and log-probs are the same bits whoever else
runs.

Shapes: C slots, T positions, N rows of a pass (multiple of 16), V vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import GenerationError, PromptTooLong
from offbeat.generate.engine.cache import DecodeContext, SlotCache
from offbeat.generate.engine.sampler import SamplingRows, sample
from offbeat.model.attention import TOKEN_ROWS, PackedContext, PackedLayout, round_up
from offbeat.model.linear import output_head
from offbeat.model.load import hidden_states
from offbeat.types import Completion, GenerateRequest, PolicyVersion, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_TOKENS = 2048
"""Prompt tokens of one prefill pass; more wait, so that decoding is not held up for long."""

_SEED_BITS = 2**64 - 1


@dataclass(slots=True, kw_only=True)
class _Slot:
    """A running request; everything per token lives in the engine's tensors."""

    request: GenerateRequest
    prompt_len: int


class Engine:
    """Continuous batching over ``slots`` rows of a model.

    Args:
        model: as loaded by ``model.load.load_model``.
        slots: requests that run at the same time; more wait in order.
        max_len: tokens of prompt plus answer that one request may have.
        eos_token_ids: end an answer unless its ``ignore_eos``.
        decode: token ids to text; used for the finished answer and for stop strings.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_len: int,
        eos_token_ids: Iterable[int],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        config, device = model.config, model.device
        self._model = model
        self._decode_text = decode
        self._eos = tuple(sorted(set(eos_token_ids)))
        self._max_len = max_len
        self._device = device
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self._cache = SlotCache(
            layers=config.num_hidden_layers,
            slots=round_up(slots, TOKEN_ROWS),
            # Families that never share keys have no such option.
            kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
            head_dim=head_dim,
            limit=max_len,
            dtype=model.dtype,
            device=device,
        )
        self._waiting: deque[GenerateRequest] = deque()
        self._running: dict[int, _Slot] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._holders: dict[bytes, list[int]] = {}
        """Slots, running or free, that hold a prompt's keys and the logits of its last token."""
        rows = round_up(slots, TOKEN_ROWS)
        self._rows = _RowState(
            rows, self._cache.capacity, output_head(model).weight.shape[0], device
        )
        self.slots = slots
        self.version = PolicyVersion(0)
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.finished = 0
        self.aborted = 0
        self.decode_spans = BusySpans()
        self.prefill_spans = BusySpans()

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests without a slot yet."""
        return len(self._waiting)

    def submit(self, request: GenerateRequest) -> None:
        """Put ``request`` at the end of the line.

        Raises:
            PromptTooLong: prompt plus ``max_new_tokens`` exceed ``max_len``.
            GenerationError: empty prompt, or a token id outside the vocabulary.
        """
        n, new = len(request.prompt_ids), request.params.max_new_tokens
        if n + new > self._max_len:
            raise PromptTooLong(
                f"request {request.request_id}: {n} prompt tokens + max_new_tokens {new} exceed "
                f"the context of {self._max_len}"
            )
        if n == 0 or new < 1:
            raise GenerationError(
                f"request {request.request_id}: {n} prompt tokens, max_new_tokens {new}; "
                "both must be at least 1"
            )
        vocab = self._rows.vocab
        if request.prompt_ids.min() < 0 or request.prompt_ids.max() >= vocab:
            raise GenerationError(
                f"request {request.request_id}: prompt has a token id outside 0..{vocab - 1}"
            )
        self._waiting.append(request)

    def abort(self, request_ids: Iterable[str]) -> list[tuple[GenerateRequest, Completion]]:
        """End these requests now, with what they wrote so far."""
        wanted = set(request_ids)
        ended = [(r, _nothing_written()) for r in self._waiting if r.request_id in wanted]
        self._waiting = deque(r for r in self._waiting if r.request_id not in wanted)
        for slot in [s for s, r in self._running.items() if r.request.request_id in wanted]:
            ended.append(self._release(slot, StopReason.ABORTED))
        self.aborted += len(ended)
        return ended

    def reset(self) -> None:
        """Forget every request, waiting or running; their callers have been told why."""
        self._waiting.clear()
        for slot in self._running:
            self._rows.active[slot] = False
            self._free.append(slot)
        self._free.sort(reverse=True)
        self._running.clear()
        self._holders.clear()
        self._cache.clear()

    def swap_weights(self, load: Callable[[], None], version: PolicyVersion) -> None:
        """Replace the weights between two steps.

        Running requests keep their keys and go on under ``version``; prompts are not shared with
        requests that start later.
        """
        load()
        self.version = version
        self._holders.clear()

    @torch.no_grad()
    def step(self) -> list[tuple[GenerateRequest, Completion]]:
        """Admit what fits, then write one token per running request; returns the finished ones."""
        finished = self._admit()
        if self._running:
            finished += self._decode()
        self.finished += len(finished)
        return finished

    # Prefill

    def _admit(self) -> list[tuple[GenerateRequest, Completion]]:
        """Give free slots to waiting requests in order; compute each distinct new prompt once."""
        fresh: dict[bytes, list[int]] = {}
        admitted: list[int] = []
        budget = PREFILL_TOKENS
        while self._waiting and self._free:
            request = self._waiting[0]
            key, n = request.prompt_ids.tobytes(), len(request.prompt_ids)
            if key not in fresh and key not in self._holders:
                if fresh and n > budget:
                    break
                budget -= n
            self._waiting.popleft()
            slot = self._start(request, key)
            admitted.append(slot)
            if key in self._holders:
                # Copied at once: the source may be given away to the next request in line.
                self._share(key, [slot], n)
            else:
                fresh.setdefault(key, []).append(slot)
        if fresh:
            self._prefill(fresh)
        return self._sample(admitted, self._rows.first_logits) if admitted else []

    def _start(self, request: GenerateRequest, key: bytes) -> int:
        """Give ``request`` a slot."""
        slot = self._take_slot(key)
        self._running[slot] = _Slot(request=request, prompt_len=len(request.prompt_ids))
        self._cache.reserve(len(request.prompt_ids) + request.params.max_new_tokens)
        self._rows.reserve(self._cache.capacity)
        self._rows.start(slot, request, self._stop_ids(request))
        return slot

    def _take_slot(self, key: bytes) -> int:
        """A free slot that holds the prompt ``key`` already, else the lowest free one."""
        own = self._holders.get(key, ())
        slot = next((s for s in reversed(self._free) if s in own), self._free[-1])
        self._free.remove(slot)
        for prompt in [k for k, slots in self._holders.items() if slot in slots and k != key]:
            self._holders[prompt].remove(slot)
            if not self._holders[prompt]:
                del self._holders[prompt]
        return slot

    def _share(self, key: bytes, slots: list[int], length: int) -> None:
        """Make ``slots`` hold the prompt ``key`` of ``length`` tokens, too."""
        holders = self._holders[key]
        targets = [s for s in slots if s not in holders]
        if targets:
            self._cache.copy_prefix(holders[0], targets, length)
            self._rows.first_logits[targets] = self._rows.first_logits[holders[0]].clone()
            holders.extend(targets)

    def _prefill(self, fresh: dict[bytes, list[int]]) -> None:
        """One packed pass over the distinct new prompts; siblings copy."""
        started = time.monotonic()
        owners = [slots[0] for slots in fresh.values()]
        lengths = [self._running[s].prompt_len for s in owners]
        layout = PackedLayout.build(lengths, device=self._device)

        def store(layer: int, key: Tensor, value: Tensor) -> None:
            for slot, begin, n in zip(owners, layout.starts, lengths, strict=True):
                self._cache.store(layer, slot, key[begin : begin + n], value[begin : begin + n])

        rows = [self._rows.tokens[s, :n] for s, n in zip(owners, lengths, strict=True)]
        ctx = PackedContext(layout, store)
        hidden = hidden_states(self._model, layout.pack(rows), layout.positions, ctx)
        last = torch.tensor(
            [b + n - 1 for b, n in zip(layout.starts, lengths, strict=True)], device=self._device
        )
        self._rows.first_logits[owners] = self._logits(hidden[last])[: len(owners)]
        for (key, slots), n in zip(fresh.items(), lengths, strict=True):
            self._holders[key] = [slots[0]]
            self._share(key, slots[1:], n)
            self.prefill_tokens += n
        self.prefill_spans.add(started, time.monotonic())

    def _logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits of ``hidden`` rows, computed on a multiple of 16 rows."""
        pad = -len(hidden) % TOKEN_ROWS
        if pad:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, pad))
        return output_head(self._model).logits(hidden).float()

    # Decode

    def _decode(self) -> list[tuple[GenerateRequest, Completion]]:
        started = time.monotonic()
        n = round_up(max(self._running) + 1, TOKEN_ROWS)
        active, length = self._rows.active[:n], self._rows.length[:n]
        last = torch.where(active, length - 1, 0)
        tokens = self._rows.tokens[:n].gather(1, last[:, None]).squeeze(1)
        write = torch.where(active, last, self._cache.scratch)
        visible = torch.where(active, length, 1)
        ctx = DecodeContext(self._cache, write, visible, self._rows.longest(self._running))
        hidden = hidden_states(self._model, tokens, last, ctx)
        slots = sorted(self._running)
        self.decode_tokens += len(slots)
        finished = self._sample(slots, self._logits(hidden))
        self.decode_spans.add(started, time.monotonic())
        return finished

    def _sample(self, slots: list[int], logits: Tensor) -> list[tuple[GenerateRequest, Completion]]:
        """Draw the next token of ``slots`` from their rows of ``logits``; end what is done."""
        rows = self._rows
        index = torch.tensor(slots, device=self._device)
        tokens, logp = sample(logits[index], *rows.sampling(index))
        if not bool(torch.isfinite(logp).all()):
            bad = [
                self._running[s].request.request_id
                for s, x in zip(slots, logp, strict=True)
                if not x.isfinite()
            ]
            raise GenerationError(
                f"non-finite log-probs at version {self.version} for {bad[:4]}: "
                "the weights have NaN or infinite values"
            )
        done, cut = rows.append(index, tokens, logp, self.version)
        # An answer that stops with the last token it may have has stopped.
        ended = dict.fromkeys(index[cut].tolist(), StopReason.LENGTH)
        ended |= {s: StopReason.STOP for s in slots if self._hit_stop_string(s)}
        ended |= dict.fromkeys(index[done].tolist(), StopReason.STOP)
        return [self._release(s, reason) for s, reason in sorted(ended.items())]

    def _hit_stop_string(self, slot: int) -> bool:
        stop = self._running[slot].request.params.stop
        return bool(stop) and any(s in self._text(slot) for s in stop)

    def _stop_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        own = request.params.stop_token_ids
        return own if request.params.ignore_eos else (*own, *self._eos)

    def _text(self, slot: int, *, without_last: bool = False) -> str:
        answer = self._rows.answer(slot, self._running[slot].prompt_len)[0]
        return self._decode_text(answer[:-1].tolist() if without_last else answer.tolist())

    def _release(self, slot: int, reason: StopReason) -> tuple[GenerateRequest, Completion]:
        """Free ``slot`` and hand out what its request wrote."""
        running = self._running[slot]
        tokens, logp, versions = self._rows.answer(slot, running.prompt_len)
        stop_token = reason is StopReason.STOP and int(tokens[-1]) in self._stop_ids(
            running.request
        )
        text = self._text(slot, without_last=stop_token)
        cuts = [text.index(s) for s in running.request.params.stop if s in text]
        completion = Completion(
            token_ids=tokens,
            logprobs=logp,
            versions=versions,
            stop_reason=reason,
            text=text[: min(cuts)] if cuts else text,
        )
        del self._running[slot]
        self._rows.active[slot] = False
        self._free.append(slot)
        self._free.sort(reverse=True)
        return running.request, completion


def _nothing_written() -> Completion:
    empty = np.zeros(0, dtype=np.int64)
    return Completion(
        token_ids=empty,
        logprobs=empty.astype(np.float32),
        versions=empty,
        stop_reason=StopReason.ABORTED,
        text="",
    )


class _RowState:
    """What each row wrote and how it samples, in tensors: a step costs little Python per token."""

    def __init__(self, rows: int, capacity: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.tokens = torch.zeros(rows, capacity, dtype=torch.long, device=device)
        self.logp = torch.zeros(rows, capacity, device=device)
        self.versions = torch.zeros(rows, capacity, dtype=torch.long, device=device)
        self.length = torch.zeros(rows, dtype=torch.long, device=device)
        self.prompt_len = torch.zeros(rows, dtype=torch.long, device=device)
        self.limit = torch.zeros(rows, dtype=torch.long, device=device)
        self.active = torch.zeros(rows, dtype=torch.bool, device=device)
        self.seed = torch.zeros(rows, dtype=torch.long, device=device)
        self.temperature = torch.ones(rows, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.long, device=device)
        self.min_p = torch.zeros(rows, device=device)
        self.stop_ids = torch.full((rows, 4), -1, dtype=torch.long, device=device)
        self.first_logits = torch.zeros(rows, vocab, device=device)
        self._special = set[int]()
        self._greedy = set[int]()
        self._ends: dict[int, int] = {}

    def reserve(self, capacity: int) -> None:
        have = self.tokens.shape[1]
        if capacity > have:
            pad = (0, capacity - have)
            self.tokens = torch.nn.functional.pad(self.tokens, pad)
            self.logp = torch.nn.functional.pad(self.logp, pad)
            self.versions = torch.nn.functional.pad(self.versions, pad)

    def start(self, slot: int, request: GenerateRequest, stop_ids: tuple[int, ...]) -> None:
        """Fill the row of ``slot`` for a new request."""
        n, params = len(request.prompt_ids), request.params
        self.tokens[slot, :n] = torch.from_numpy(request.prompt_ids.copy())
        self.length[slot] = n
        self.prompt_len[slot] = n
        self.limit[slot] = n + params.max_new_tokens
        self.seed[slot] = int(np.uint64(request.seed & _SEED_BITS).astype(np.int64))
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = params.top_k
        self.min_p[slot] = params.min_p
        if len(stop_ids) > self.stop_ids.shape[1]:
            grow = (0, len(stop_ids) - self.stop_ids.shape[1])
            self.stop_ids = torch.nn.functional.pad(self.stop_ids, grow, value=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.long)
        self.active[slot] = True
        cut = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
        (self._special.add if cut else self._special.discard)(slot)
        (self._greedy.add if params.temperature <= 0 else self._greedy.discard)(slot)
        self._ends[slot] = n

    def longest(self, slots: Iterable[int]) -> int:
        """The largest length among ``slots``, without a device sync."""
        return max(self._ends[s] for s in slots)

    def sampling(self, index: Tensor) -> tuple[SamplingRows, Tensor, Tensor]:
        """Sampling options, seeds and answer positions of the rows in ``index``."""
        rows = SamplingRows(
            temperature=self.temperature[index],
            top_p=self.top_p[index],
            top_k=self.top_k[index],
            min_p=self.min_p[index],
            truncated=bool(self._special),
            greedy=bool(self._greedy),
        )
        return rows, self.seed[index], self.length[index] - self.prompt_len[index]

    def append(
        self, index: Tensor, tokens: Tensor, logp: Tensor, version: PolicyVersion
    ) -> tuple[Tensor, Tensor]:
        """Write one token per row; returns which rows met a stop id and which are full."""
        place = self.length[index]
        self.tokens[index, place] = tokens
        self.logp[index, place] = logp
        self.versions[index, place] = version
        self.length[index] = place + 1
        for slot in index.tolist():
            self._ends[slot] += 1
        done = (tokens[:, None] == self.stop_ids[index]).any(1)
        return done, place + 1 >= self.limit[index]

    def answer(self, slot: int, prompt_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the row wrote: token ids int64, log-probs float32, versions int64."""
        end = self._ends[slot]
        parts = (self.tokens, self.logp, self.versions)
        tokens, logp, versions = (p[slot, prompt_len:end].cpu().numpy().copy() for p in parts)
        return tokens, logp, versions


class BusySpans:
    """When a kind of forward pass ran; written by the engine thread, taken by the loop.

    Spans less than ``GAP`` seconds apart are joined: a steady stream of steps is one span.
    """

    GAP = 1e-3

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[float, float]] = []

    def add(self, start: float, end: float) -> None:
        with self._lock:
            if self._spans and start - self._spans[-1][1] < self.GAP:
                start = self._spans.pop()[0]
            self._spans.append((start, end))

    def take(self) -> tuple[tuple[float, float], ...]:
        """Everything since the last call."""
        with self._lock:
            spans, self._spans = tuple(self._spans), []
        return spans

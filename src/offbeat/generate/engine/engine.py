"""The engine's core: requests in, completions out, one ``step`` at a time.

Owns the waiting line, who runs in which slot, the weights' version, and the order of things in a
step. Synchronous and single-threaded: whoever drives it (``generate/server.py``) calls everything
from one thread, so a weight swap and a forward pass can never overlap. What a slot wrote is in
``rows.py``, its keys in ``cache.py``, who shares which prompt in ``prompts.py``.

A step gives free slots to waiting requests, then runs one forward pass: a row for each request that
decodes and the next chunk of prompts that are not computed yet, so that long prompts never hold up
decoding. A request whose prompt lies in a slot already, under the present weights, copies it from
there. When the weights change, a request that decodes keeps its keys; or it joins those whose
prompt is not computed yet, what it wrote being the end of its prompt. Everything a token depends on
(its slot's keys, its own random stream) is private to its request, so tokens and log-probs are the
same bits whoever else runs and however prompts are cut.

Shapes: C slots, N rows of a pass (multiple of 16), V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import GenerationError
from offbeat.generate.engine.admission import check_request
from offbeat.generate.engine.cache import DecodeContext, HeadShape, SlotCache
from offbeat.generate.engine.chunks import ChunkLayout
from offbeat.generate.engine.prompts import Chunk, PromptBook
from offbeat.generate.engine.rows import SlotRows
from offbeat.generate.engine.runs import Run, new_order, plan_runs
from offbeat.generate.engine.sampler import sample
from offbeat.generate.engine.spans import BusySpans
from offbeat.generate.engine.stops import ends_with_stop
from offbeat.model.attention import TOKEN_ROWS, round_up
from offbeat.model.linear import output_head
from offbeat.model.load import hidden_states
from offbeat.types import (
    Completion,
    GenerateRequest,
    IntArray,
    PolicyVersion,
    Progress,
    StopReason,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_TOKENS = 2048
"""Prompt tokens of one pass when nothing decodes."""

PREFILL_CHUNK = 256
"""Prompt tokens of one pass beside decoding: what a decoding request waits for at most."""

Finished: TypeAlias = list[tuple[GenerateRequest, Completion]]
Failed: TypeAlias = list[tuple[GenerateRequest, GenerationError]]


@dataclass(slots=True, kw_only=True)
class _Running:
    """A request in a slot. ``versions``: since which answer token which version wrote."""

    request: GenerateRequest
    key: bytes
    versions: list[tuple[int, PolicyVersion]]


class Engine:
    """Continuous batching over ``slots`` rows of a model.

    Args:
        model: as loaded by ``model.load.load_model``.
        slots: requests that run at the same time; more wait in order.
        max_len: tokens of prompt plus answer that one request may have.
        eos_token_ids: end an answer unless its ``ignore_eos``.
        decode: token ids to text; used for the finished answer and for stop strings.
        recompute_kv: see ``swap_weights``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_len: int,
        eos_token_ids: Iterable[int],
        decode: Callable[[Sequence[int]], str],
        recompute_kv: bool = False,
    ) -> None:
        device, heads = model.device, HeadShape.of(model)
        self._model = model
        self._decode_text = decode
        self._eos = tuple(sorted(set(eos_token_ids)))
        self._max_len = max_len
        self._device = device
        self._recompute_kv = recompute_kv
        rows = round_up(slots, TOKEN_ROWS)
        self._cache = SlotCache(
            layers=model.config.num_hidden_layers,
            slots=rows,
            kv_heads=heads.kv_heads,
            head_dim=heads.dim,
            limit=max_len,
            dtype=model.dtype,
            device=device,
        )
        self._rows = SlotRows(rows, device)
        self._vocab = output_head(model).weight.shape[0]
        self._prompts = PromptBook()
        self._waiting: deque[GenerateRequest] = deque()
        self._running: dict[int, _Running] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._failed: Failed = []
        """At most the requests that ran; whoever drives the engine takes them after each step."""
        self._any_finite = True
        """Whether some log-prob of the last step was finite."""
        self.slots = slots
        self.version = PolicyVersion(0)
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.finished = 0
        self.aborted = 0
        self.decode_spans = BusySpans()
        """Passes with decode rows."""
        self.prefill_spans = BusySpans()
        """Passes with prompt rows; a pass may have both."""

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
            PromptTooLong, GenerationError: see ``check_request``; nothing has joined the others.
        """
        check_request(request, max_len=self._max_len, vocab=self._vocab)
        self._waiting.append(request)

    def abort(self, request_ids: Iterable[str]) -> Finished:
        """End these requests now, with what they wrote so far."""
        wanted = set(request_ids)
        ended = [(r, _nothing_written()) for r in self._waiting if r.request_id in wanted]
        self._waiting = deque(r for r in self._waiting if r.request_id not in wanted)
        for slot in [s for s, r in self._running.items() if r.request.request_id in wanted]:
            prompt = self._prompts.leave(slot)
            if prompt is not None:
                self._cache.copy_prefix(slot, prompt.slots[:1], prompt.done)
            ended.append(self._release(slot, StopReason.ABORTED))
        self.aborted += len(ended)
        return ended

    def reset(self) -> None:
        """Forget every request, waiting or running; their callers have been told why."""
        self._waiting.clear()
        for slot in self._running:
            self._rows.end(slot)
            self._free.append(slot)
        self._free.sort(reverse=True)
        self._running.clear()
        self._failed.clear()
        self._prompts.clear()
        self._cache.clear()

    def written(self, beyond: Mapping[str, int]) -> dict[str, Progress]:
        """What running requests wrote beyond so many tokens, of those that did."""
        found: dict[str, Progress] = {}
        for slot, running in self._running.items():
            name = running.request.request_id
            begin = beyond.get(name)
            if begin is not None and self._rows.written[slot] > begin:
                tokens, logp = self._rows.answer(slot, begin)
                found[name] = Progress(start=begin, token_ids=tokens, logprobs=logp)
        return found

    def swap_weights(self, load: Callable[[], None], version: PolicyVersion) -> None:
        """Replace the weights between two steps.

        Prompts are not shared with requests that start later, and those of which a part is computed
        start anew. Requests that decode keep their keys and go on under ``version``. With
        ``recompute_kv`` their keys are computed anew before their next token: the prompt once for
        all that share it, then what each of them wrote. While swaps come faster than that, such a
        request gets no token.
        """
        load()
        self.version = version
        self._prompts.clear()
        if self._recompute_kv:
            self._rows.suspend()
        for slot, running in self._running.items():
            running.versions.append((int(self._rows.written[slot]), version))
            if not self._rows.decoding[slot]:
                self._prompts.wait(running.key, running.request.prompt_ids, slot)

    @torch.no_grad()
    def step(self) -> Finished:
        """Admit what fits, then one pass; returns the requests that finished.

        Every request that decodes gets one token. One whose prompt is complete gets its first, one
        whose keys were computed anew its next. One whose log-probs are not finite gets none and
        ends; ``take_failed`` has it.

        Raises:
            GenerationError: no log-prob of this step is finite, so it is the weights.
        """
        self._any_finite, before = False, len(self._failed)
        finished = self._admit()
        lengths, runs = self._arrange()
        chunks = self._prompts.plan(PREFILL_CHUNK if len(lengths) else PREFILL_TOKENS)
        if len(lengths) or chunks:
            finished += self._pass(lengths, runs, chunks)
        self.finished += len(finished)
        bad = [request.request_id for request, _ in self._failed[before:]]
        if bad and not self._any_finite:
            raise GenerationError(
                f"non-finite log-probs at version {self.version} for {bad[:4]}: "
                "the weights have NaN or infinite values"
            )
        return finished

    def take_failed(self) -> Failed:
        """The requests that ended without an answer since the last call, and why."""
        failed, self._failed = self._failed, []
        return failed

    # Admission

    def _admit(self) -> Finished:
        """Give free slots to waiting requests in order; those whose prompt is held start."""
        ready: list[int] = []
        logits: list[Tensor] = []
        while self._waiting and self._free:
            request = self._waiting.popleft()
            key = request.prompt_ids.tobytes()
            slot = self._start(request, key)
            held = self._prompts.held(key)
            if held is None:
                self._prompts.wait(key, request.prompt_ids, slot)
                continue
            if slot not in held.slots:
                # Copied at once: the source may be given away to the next request in line.
                self._cache.copy_prefix(held.slots[0], [slot], len(request.prompt_ids))
                held.slots.append(slot)
            ready.append(slot)
            logits.append(held.logits)
        return self._next_tokens(ready, torch.stack(logits)) if ready else []

    def _start(self, request: GenerateRequest, key: bytes) -> int:
        """Give ``request`` a slot."""
        slot = self._take_slot(key)
        self._running[slot] = _Running(request=request, key=key, versions=[(0, self.version)])
        self._rows.start(slot, request, self._stop_ids(request))
        return slot

    def _take_slot(self, key: bytes) -> int:
        """A free slot that holds the prompt ``key`` already, else the lowest free one."""
        held = self._prompts.held(key)
        own = held.slots if held is not None else ()
        slot = next((s for s in reversed(self._free) if s in own), self._free[-1])
        self._free.remove(slot)
        self._prompts.vacate(slot, unless=key)
        return slot

    # The pass

    def _pass(self, lengths: IntArray, runs: tuple[Run, ...], chunks: list[Chunk]) -> Finished:
        """One forward pass over what decodes and ``chunks``, and what follows from its logits."""
        started = time.monotonic()
        layout = ChunkLayout(chunks, begin=len(lengths), device=self._device) if chunks else None
        hidden = self._forward(lengths, runs, layout)
        decoding, n = np.flatnonzero(lengths), self._rows.extent
        logits = self._logits(hidden, n, layout.ends if layout is not None else [])
        finished: Finished = []
        if n:
            finished += self._sample(decoding, logits[:n], slice(0, n))
            self.decode_tokens += len(decoding)
        if chunks:
            finished += self._complete(chunks, logits[n:])
        ended = time.monotonic()
        if n:
            self.decode_spans.add(started, ended)
        if chunks:
            self.prefill_spans.add(started, ended)
        return finished

    def _arrange(self) -> tuple[IntArray, tuple[Run, ...]]:
        """Keys of each decode row and the runs they are attended in; may renumber slots."""
        n = round_up(self._rows.extent, TOKEN_ROWS)
        if not n:
            return np.zeros(0, dtype=np.int64), ()
        lengths = self._rows.lengths(n)
        plan = plan_runs(lengths)
        if plan.renumber:
            self._renumber(lengths)
            n = round_up(self._rows.extent, TOKEN_ROWS)
            lengths = self._rows.lengths(n)
            plan = plan_runs(lengths)
        return lengths, plan.runs

    def _renumber(self, lengths: IntArray) -> None:
        """Order slots by what they hold; see ``runs.py``."""
        order = np.arange(len(self._rows.decoding))
        order[: len(lengths)] = new_order(lengths)
        moved = np.flatnonzero(order != np.arange(len(order)))
        written = self._rows.prompt_len + self._rows.written
        self._cache.renumber(order, int(written[moved].max()))
        self._rows.renumber(order)
        number = np.argsort(order).tolist()
        self._running = {number[s]: r for s, r in self._running.items()}
        self._free = sorted((number[s] for s in self._free), reverse=True)
        self._prompts.renumber(number)

    def _forward(
        self, lengths: IntArray, runs: tuple[Run, ...], layout: ChunkLayout | None
    ) -> Tensor:
        """Hidden states [N, E]: decode rows, then those of ``layout``."""
        longest = int(lengths.max(initial=0))
        self._cache.reserve(max(longest, layout.longest if layout is not None else 0))
        decoding, places = lengths > 0, np.maximum(lengths - 1, 0)
        tokens, positions, writes, visible = (
            torch.from_numpy(x).to(self._device)
            for x in (
                self._rows.newest(len(lengths)),
                places,
                np.where(decoding, places, self._cache.scratch),
                places + 1,
            )
        )
        ctx = DecodeContext(self._cache, writes, visible, longest, runs=runs, chunks=layout)
        if layout is not None:
            tokens = torch.cat([tokens, layout.tokens])
            positions = torch.cat([positions, layout.positions])
        return hidden_states(self._model, tokens, positions, ctx)

    def _logits(self, hidden: Tensor, n: int, ends: list[int]) -> Tensor:
        """Float32 logits [≥ n + ends, V] of the first ``n`` rows and of those in ``ends``.

        Computed on a multiple of 16 rows; ``hidden`` has no fewer.
        """
        rows = round_up(n + len(ends), TOKEN_ROWS)
        if ends:
            index = torch.zeros(rows, dtype=torch.long)
            index[:n] = torch.arange(n)
            index[n : n + len(ends)] = torch.tensor(ends)
            hidden = hidden.index_select(0, index.to(self._device))
        return output_head(self._model).logits(hidden[:rows]).float()

    def _complete(self, chunks: list[Chunk], logits: Tensor) -> Finished:
        """Book computed ``chunks``; requests that have all their keys draw their next token.

        ``logits`` has a row for each chunk that is the last of its prompt, in their order.
        """
        for chunk in chunks:
            self.prefill_tokens += chunk.end - chunk.begin
            if not chunk.last:
                self._prompts.advance(chunk)
        ready: list[int] = []
        sources: list[int] = []
        for row, chunk in enumerate(c for c in chunks if c.last):
            slots = self._hand_out(chunk, logits[row])
            ready += slots
            sources += [row] * len(slots)
        if not ready:
            return []
        return self._next_tokens(ready, logits[torch.tensor(sources, device=self._device)])

    def _hand_out(self, chunk: Chunk, logits: Tensor) -> list[int]:
        """Give the keys up to ``chunk``, the last of its prompt, to all who wait for them.

        Returns the slots that have all their keys; those that wrote more wait for the rest.
        """
        slots = self._prompts.complete(chunk.key)
        self._cache.copy_prefix(slots[0], slots[1:], chunk.end)
        own = [s for s in slots if self._running[s].key == chunk.key]
        if own:
            self._prompts.hold(chunk.key, own, logits.clone())
        ready: list[int] = []
        for slot in slots:
            prompt = self._running[slot].request.prompt_ids
            context = np.concatenate([prompt, self._rows.tokens(slot)])
            if len(context) == chunk.end:
                ready.append(slot)
            else:
                self._prompts.wait(context.tobytes(), context, slot, done=chunk.end)
        return ready

    # Tokens

    def _next_tokens(self, slots: list[int], logits: Tensor) -> Finished:
        """Draw a token for each of ``slots`` from as many rows of ``logits``."""
        return self._sample(np.array(slots), logits, np.array(slots))

    def _sample(self, slots: IntArray, logits: Tensor, rows: IntArray | slice) -> Finished:
        """Draw the next token of ``slots``; end what is done.

        ``rows`` says whose the rows of ``logits`` are; a slice may have some that nobody needs,
        which costs less than to copy the others.
        """
        drawn, scores = sample(logits, *self._rows.sampling(rows, slots))
        tokens, logp = drawn.cpu().numpy(), scores.cpu().numpy()
        if isinstance(rows, slice):
            tokens, logp = tokens[slots], logp[slots]
        finite = np.isfinite(logp)
        if not finite.all():
            for slot in slots[~finite].tolist():
                self._fail(slot)
            slots, tokens, logp = slots[finite], tokens[finite], logp[finite]
        self._any_finite |= bool(finite.any())
        ended = self._rows.append(slots, tokens, logp)
        # An answer that stops with the last token it may have has stopped.
        reasons = dict.fromkeys(ended.full.tolist(), StopReason.LENGTH)
        for slot in slots[self._rows.has_stops[slots]].tolist():
            stops = self._running[slot].request.params.stop
            if ends_with_stop(self._rows.tokens(slot), stops, self._decode_text):
                reasons[slot] = StopReason.STOP
        reasons |= dict.fromkeys(ended.stopped.tolist(), StopReason.STOP)
        return [self._release(slot, reason) for slot, reason in sorted(reasons.items())]

    def _fail(self, slot: int) -> None:
        """End the request in ``slot``, whose keys nobody may copy nor meet behind a mask."""
        request = self._leave(slot).request
        self._prompts.vacate(slot)
        self._cache.clear_slot(slot)
        reason = (
            f"request {request.request_id}: non-finite log-probs at version {self.version}, while "
            "those of other requests are finite"
        )
        self._failed.append((request, GenerationError(reason)))

    def _stop_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        own = request.params.stop_token_ids
        return own if request.params.ignore_eos else (*own, *self._eos)

    def _release(self, slot: int, reason: StopReason) -> tuple[GenerateRequest, Completion]:
        """Free ``slot`` and hand out what its request wrote."""
        tokens, logp = self._rows.answer(slot)
        running = self._leave(slot)
        request = running.request
        at_token = reason is StopReason.STOP and int(tokens[-1]) in self._stop_ids(request)
        text = self._decode_text((tokens[:-1] if at_token else tokens).tolist())
        cuts = [text.index(s) for s in request.params.stop if s in text]
        completion = Completion(
            token_ids=tokens,
            logprobs=logp,
            versions=_per_token(running.versions, len(tokens)),
            stop_reason=reason,
            text=text[: min(cuts)] if cuts else text,
        )
        return request, completion

    def _leave(self, slot: int) -> _Running:
        """Free ``slot``; returns who ran there."""
        self._rows.end(slot)
        self._free.append(slot)
        self._free.sort(reverse=True)
        return self._running.pop(slot)


def _per_token(versions: list[tuple[int, PolicyVersion]], length: int) -> np.ndarray:
    """The version of each of ``length`` tokens."""
    begins = np.array([begin for begin, _ in versions] + [length])
    return np.repeat(np.array([v for _, v in versions], dtype=np.int64), np.diff(begins))


def _nothing_written() -> Completion:
    empty = np.zeros(0, dtype=np.int64)
    return Completion(
        token_ids=empty,
        logprobs=empty.astype(np.float32),
        versions=empty,
        stop_reason=StopReason.ABORTED,
        text="",
    )

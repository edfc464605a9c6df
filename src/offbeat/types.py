"""The nouns of offbeat: values that travel between stages.

Owns the shape of every hop (who reads what is written by whom); knows no configuration, no
processes and no torch. Per-token arrays are one-dimensional numpy arrays. Token ids and versions
are int64, log-probs are float32 in nats.

The life of one group, in types::

    Prompt ──► GenerateRequest ──► Completion ──► Turn, Rollout(reward)
           ──► RolloutGroup ──► TrainSample ──► StepReport
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

PolicyVersion = NewType("PolicyVersion", int)
"""The weights before update k. Version 0 is the model as loaded."""

GroupId = NewType("GroupId", int)
"""Position in the endless seeded prompt stream; also ticket, ledger row, sampling seed and data
cursor.
"""

OUTSIDE_GROUP = GroupId(-2)
"""The ``group_id`` of requests that belong to no group of the run and not to its evaluation."""

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


class StopReason(StrEnum):
    """Why a completion ended, as the engine recorded it; never re-derived from token ids."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


class NoSignal(StrEnum):
    """Why no token of a group gets a gradient from its rewards."""

    EMPTY = "empty"
    TRUNCATED = "truncated"
    EQUAL = "equal"


class DropReason(StrEnum):
    """Why a group ended without being trained on."""

    FAILED = "failed"
    INVALID_REWARD = "invalid_reward"
    FILTERED = "filtered"
    STALE = "stale"
    TOO_LONG = "too_long"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message: ``role`` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data set at its place in the stream.

    ``token_ids`` is what the model reads; ``text`` is what a person and a reward function read (for
    chat rows: the content of the last user message). ``columns`` are the row's other columns.
    """

    group_id: GroupId
    epoch: int
    row: int
    token_ids: IntArray
    text: str
    messages: tuple[Message, ...] = ()
    columns: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one answer.

    ``temperature`` 0 is greedy; ``top_p`` 1, ``top_k`` 0 and ``min_p`` 0 are off. ``stop`` strings
    end the answer and trim its text (tokens stay); ``stop_token_ids`` come in addition to the
    model's own end-of-sequence ids, which ``ignore_eos`` switches off.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One completion to generate; idempotent by ``request_id``.

    ``seed`` (64 bits) names the request's random stream: the token at answer position i depends on
    (seed, i, logits) only, never on which other requests run beside it. ``group_id`` and ``turn``
    tell the engine which requests share their prompt; evaluation requests carry ``group_id`` -1,
    those from outside of the run ``OUTSIDE_GROUP``.
    ``stream``: what is written is handed out as it is written, as ``Progress``.
    """

    request_id: str
    group_id: GroupId
    sibling: int
    turn: int
    prompt_ids: IntArray
    params: SamplingParams
    seed: int
    stream: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a streamed request wrote since its last ``Progress``: arrays of equal length.

    ``start`` is the place of the first token in the answer. It may go back: a request that was
    asked for again, because a process or a reply was lost, is written again from 0 on. What is
    written when the answer ends comes with its ``Completion`` only, which has all of it.
    """

    start: int
    token_ids: IntArray
    logprobs: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine wrote: equal-length per-token arrays, the sampled stop token included.

    ``logprobs[i]`` is the log-probability (nats) of ``token_ids[i]`` under the distribution
    actually sampled from, by the weights of ``versions[i]``. ``text`` is the decoded answer without
    stop token or stop string.
    """

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    stop_reason: StopReason
    text: str

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if len(self.logprobs) != n or len(self.versions) != n:
            raise ValueError(
                f"Completion arrays differ in length: token_ids {n}, "
                f"logprobs {len(self.logprobs)}, versions {len(self.versions)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A reward that was really computed: a finite ``value`` and, by name, its parts."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(
                f"a Scored reward must be finite, got {self.value}; use Invalid(reason=...)"
            )

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalid:
    """No reward could be computed, and why. Leaves baseline and loss; never a silent zero."""

    reason: str


Reward: TypeAlias = Scored | Invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange: everything the model read before it wrote ``completion``.

    In a later turn ``prompt_ids`` starts with the previous turn's prompt and completion, followed
    by what the environment replied.
    """

    prompt_ids: IntArray
    completion: Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sibling: its turns in order and the reward of the whole."""

    sibling: int
    turns: tuple[Turn, ...]
    reward: Reward

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("a Rollout needs at least one turn")

    @property
    def written_tokens(self) -> int:
        """Tokens that the policy wrote, over all turns."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The siblings of one prompt, with the policy version that was live at their admission."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    admission_version: PolicyVersion

    @property
    def valid(self) -> tuple[Rollout, ...]:
        """The rollouts with a ``Scored`` reward."""
        return tuple(r for r in self.rollouts if isinstance(r.reward, Scored))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One rollout as a flat row; every array is ``[T]``: the last turn's tokens, prompt included.

    ``loss_mask[t]`` is true where the policy wrote token t. ``behave_logp`` (nats, float32) and
    ``versions`` belong to token t and are 0 and -1 where the mask is false. ``truncated``: the last
    turn stopped by ``length``.
    """

    group_id: GroupId
    sibling: int
    tokens: IntArray
    loss_mask: BoolArray
    behave_logp: FloatArray
    versions: IntArray
    reward: float
    truncated: bool

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.loss_mask), len(self.behave_logp), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(
                f"TrainSample arrays of group {self.group_id} differ in length: {sorted(lengths)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Weights of one version, ready to be read.

    A safetensors file of ``nbytes`` bytes at ``uri``, whose xxh3-128 is ``digest``.
    """

    version: PolicyVersion
    uri: str
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the bits of a computation depend on beside its inputs: torch and how it was built, CPU
    threads, and the processor with its instruction sets.
    """

    torch: str
    build: str
    threads: int
    processor: str
    cpu_flags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """All of a trainer's state at one version, ready to be read.

    ``tensors`` is a safetensors file like that of a ``WeightUpdate``, with optimizer moments and
    random state beside the weights; it stays as it is until the next one is asked for.
    ``optimizer_steps`` were taken so far: the place in the learning-rate schedule.
    """

    tensors: WeightUpdate
    optimizer_steps: int
    environment: Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRef:
    """Bytes at a path that another process of this machine can open, with their xxh3-128 digest."""

    uri: str
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one ``update`` did; ``version`` is the one it produced.

    ``metrics`` maps declared metric names to values already reduced over the whole batch; times in
    them are seconds, log-ratios nats. ``started`` and ``ended`` are CLOCK_MONOTONIC seconds of the
    trainer process (comparable on one machine). ``advantages`` has one for each sample, in the
    order of the samples: the mean over its policy tokens; empty when they are not reported.
    ``staging_seconds`` were spent waiting for the copy of a snapshot.
    """

    version: PolicyVersion
    tokens: int
    rows: int
    started: float
    ended: float
    metrics: Mapping[str, float]
    advantages: tuple[float, ...] = ()
    staging_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorStats:
    """Counters of one generator since its start, and when it computed since the last call.

    ``decode_spans`` and ``prefill_spans`` are (start, end) pairs of CLOCK_MONOTONIC seconds in
    which a forward pass ran.
    """

    version: PolicyVersion
    slots: int
    running: int
    waiting: int
    prefill_tokens: int
    decode_tokens: int
    finished: int
    aborted: int
    paused: bool
    peak_rss_bytes: int
    decode_spans: tuple[tuple[float, float], ...] = ()
    prefill_spans: tuple[tuple[float, float], ...] = ()

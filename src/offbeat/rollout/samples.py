"""From rollouts to training rows: the one conversion, and the same from rollouts on disk.

Owns which tokens are trained on: those that the policy wrote, in any turn, told by who wrote them
and never by the token's value. Knows no advantages and no batches.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from offbeat.errors import RolloutError
from offbeat.observe.rollouts import RolloutRow
from offbeat.types import (
    BoolArray,
    FloatArray,
    IntArray,
    Rollout,
    RolloutGroup,
    Scored,
    StopReason,
    TrainSample,
    Turn,
)


def _written(turn: Turn) -> IntArray:
    """All tokens at the end of ``turn``: what the model read and what it wrote."""
    return np.concatenate([turn.prompt_ids, turn.completion.token_ids]).astype(np.int64)


def _first_difference(before: IntArray, after: IntArray) -> int:
    """The first position at which ``after`` does not continue ``before``; -1 if it does."""
    shared = min(len(before), len(after))
    different = np.flatnonzero(before[:shared] != after[:shared])
    if len(different):
        return int(different[0])
    return -1 if len(after) >= len(before) else shared


def _check_continues(where: str, rollout: Rollout) -> None:
    for k in range(1, len(rollout.turns)):
        position = _first_difference(_written(rollout.turns[k - 1]), rollout.turns[k].prompt_ids)
        if position >= 0:
            raise RolloutError(
                f"{where}, turn {k}: the prompt does not start with the tokens of turn {k - 1} "
                f"(first difference at position {position}); append the completion's own ids, "
                "never its text encoded again"
            )


def _sample(group: RolloutGroup, rollout: Rollout, reward: Scored) -> TrainSample:
    where = f"group {group.prompt.group_id}, sibling {rollout.sibling}"
    _check_continues(where, rollout)
    tokens = _written(rollout.turns[-1])
    loss_mask: BoolArray = np.zeros(len(tokens), dtype=np.bool_)
    behave_logp: FloatArray = np.zeros(len(tokens), dtype=np.float32)
    versions: IntArray = np.full(len(tokens), -1, dtype=np.int64)
    for k, turn in enumerate(rollout.turns):
        wrote = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion.token_ids))
        finite = np.isfinite(turn.completion.logprobs)
        if not finite.all():
            position = wrote.start + int(np.flatnonzero(~finite)[0])
            raise RolloutError(f"{where}, turn {k}: log-prob at position {position} is not finite")
        loss_mask[wrote] = True
        behave_logp[wrote] = turn.completion.logprobs
        versions[wrote] = turn.completion.versions
    return TrainSample(
        group_id=group.prompt.group_id,
        sibling=rollout.sibling,
        tokens=tokens,
        loss_mask=loss_mask,
        behave_logp=behave_logp,
        versions=versions,
        reward=reward.value,
        truncated=rollout.turns[-1].completion.stop_reason is StopReason.LENGTH,
    )


def to_samples(group: RolloutGroup) -> list[TrainSample]:
    """One training row per rollout with a ``Scored`` reward, in sibling order; ``Invalid`` ones are
    left out.

    Raises:
        RolloutError: a turn does not continue the tokens of the turn before it, or a log-prob is
            not finite; names group, sibling, turn and position.
    """
    return [
        _sample(group, rollout, rollout.reward)
        for rollout in group.rollouts
        if isinstance(rollout.reward, Scored)
    ]


def recorded_samples(rows: Iterable[RolloutRow]) -> list[TrainSample]:
    """The rows that ``to_samples`` made of the rollouts in ``rows``: the same bits, in the same
    order.
    """
    return [_recorded(row, row.reward) for row in rows if row.reward is not None]


def _recorded(row: RolloutRow, reward: float) -> TrainSample:
    read = len(row.prompt_ids)
    return TrainSample(
        group_id=row.group_id,
        sibling=row.sibling,
        tokens=np.concatenate([row.prompt_ids, row.token_ids]),
        loss_mask=np.concatenate([np.zeros(read, dtype=np.bool_), row.loss_mask]),
        behave_logp=np.concatenate([np.zeros(read, dtype=np.float32), row.logprobs]),
        versions=np.concatenate([np.full(read, -1, dtype=np.int64), row.versions]),
        reward=reward,
        truncated=row.stop_reason is StopReason.LENGTH,
    )

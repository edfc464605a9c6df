"""Rollouts on disk: one Parquet file per step, one row per rollout.

Consumes `RolloutGroup` values, valid rewards and invalid ones; produces
``rollouts/step-000012.parquet`` and reads it back. ``pyarrow`` costs a tenth of a second and tens
of megabytes, so it is imported when the first file is written.

Columns of tokens: ``prompt_ids`` is what the model read first; ``token_ids`` all that follows, the
environment's replies included; ``loss_mask``, ``logprobs`` (nats) and ``versions`` belong to
``token_ids`` and are false, 0 and -1 on tokens that the policy did not write.

Beside the rows a file holds how its update was computed and which weights came out, as text whose
meaning is not known here (`offbeat.pipeline.update_record`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offbeat.errors import DataError
from offbeat.observe.files import Guard, replacing
from offbeat.types import (
    BoolArray,
    FloatArray,
    GroupId,
    IntArray,
    PolicyVersion,
    Reward,
    Rollout,
    RolloutGroup,
    Scored,
    StopReason,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

FOLDER = "rollouts"

_UPDATE_KEY = "offbeat.update"
"""Where the Parquet file's own metadata has the record of the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One rollout as it was recorded; ``reward`` is None when it could not be computed, for
    ``invalid_reason``.

    ``token_ids``, ``loss_mask``, ``logprobs`` and ``versions`` have equal length. ``advantage`` is
    None when the trainer did not report it.
    """

    step: int
    group_id: GroupId
    sibling: int
    epoch: int
    row: int
    admission_version: PolicyVersion
    prompt: str
    answer: str
    reward: float | None
    invalid_reason: str | None
    reward_parts: Mapping[str, float]
    stop_reason: StopReason
    advantage: float | None
    prompt_ids: IntArray
    token_ids: IntArray
    loss_mask: BoolArray
    logprobs: FloatArray
    versions: IntArray


class RolloutLog:
    """Writes the rollouts of each step; a failure is logged once and ends the recording, never the
    training.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._guard = Guard("rollouts", run_dir / FOLDER)

    @property
    def failure(self) -> str | None:
        """Why recording ended, or None."""
        return self._guard.failure

    def write(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        advantages: Mapping[tuple[GroupId, int], float] | None = None,
        update: str | None = None,
    ) -> None:
        """Write the file of ``step``, aside and then renamed.

        Args:
            advantages: by (group id, sibling).
            update: what to keep of how its weights came about; see ``read_update``.
        """
        known = advantages or {}
        path = rollouts_path(self._run_dir, step)
        self._guard.run(lambda: _write(path, _rows(step, groups, known), update))


def rollouts_path(run_dir: Path, step: int) -> Path:
    """Where the rollouts of ``step`` are, or will be."""
    return run_dir / FOLDER / f"step-{step:06d}.parquet"


def _rows(
    step: int, groups: Sequence[RolloutGroup], advantages: Mapping[tuple[GroupId, int], float]
) -> list[RolloutRow]:
    return [
        _row(step, group, rollout, advantages.get((group.prompt.group_id, rollout.sibling)))
        for group in groups
        for rollout in group.rollouts
    ]


def _row(step: int, group: RolloutGroup, rollout: Rollout, advantage: float | None) -> RolloutRow:
    reward = rollout.reward
    tokens, mask, logprobs, versions = _answer_arrays(rollout)
    return RolloutRow(
        step=step,
        group_id=group.prompt.group_id,
        sibling=rollout.sibling,
        epoch=group.prompt.epoch,
        row=group.prompt.row,
        admission_version=group.admission_version,
        prompt=_encodable(group.prompt.text),
        answer=_encodable("\n".join(turn.completion.text for turn in rollout.turns)),
        reward=float(reward.value) if isinstance(reward, Scored) else None,
        invalid_reason=None if isinstance(reward, Scored) else _encodable(reward.reason),
        reward_parts=_parts(reward),
        stop_reason=rollout.turns[-1].completion.stop_reason,
        advantage=advantage,
        prompt_ids=rollout.turns[0].prompt_ids,
        token_ids=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
    )


def _parts(reward: Reward) -> Mapping[str, float]:
    parts = reward.parts if isinstance(reward, Scored) else {}
    return {_encodable(name): float(value) for name, value in parts.items()}


def _encodable(text: str) -> str:
    """``text`` without lone surrogates, which no UTF-8 file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _answer_arrays(rollout: Rollout) -> tuple[IntArray, BoolArray, FloatArray, IntArray]:
    """All tokens after the first prompt: ids [T], loss mask [T], log-probs [T], versions [T]."""
    last, skip = rollout.turns[-1], len(rollout.turns[0].prompt_ids)
    tokens = np.concatenate([last.prompt_ids[skip:], last.completion.token_ids])
    mask = np.zeros(len(tokens), dtype=np.bool_)
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    versions = np.full(len(tokens), -1, dtype=np.int64)
    for turn in rollout.turns:
        begin = len(turn.prompt_ids) - skip
        written = slice(begin, begin + len(turn.completion.token_ids))
        mask[written] = True
        logprobs[written] = turn.completion.logprobs
        versions[written] = turn.completion.versions
    return tokens.astype(np.int64, copy=False), mask, logprobs, versions


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            ("step", pa.int64()),
            ("group_id", pa.int64()),
            ("sibling", pa.int32()),
            ("epoch", pa.int32()),
            ("row", pa.int64()),
            ("admission_version", pa.int64()),
            ("prompt", pa.string()),
            ("answer", pa.string()),
            ("reward", pa.float64()),
            ("invalid_reason", pa.string()),
            ("reward_parts", pa.map_(pa.string(), pa.float64())),
            ("stop_reason", pa.string()),
            ("advantage", pa.float64()),
            ("prompt_ids", pa.list_(pa.int64())),
            ("token_ids", pa.list_(pa.int64())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("logprobs", pa.list_(pa.float32())),
            ("versions", pa.list_(pa.int64())),
        ]
    )


def _write(path: Path, rows: Sequence[RolloutRow], update: str | None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    columns = {name: [_cell(getattr(row, name)) for row in rows] for name in schema.names}
    table = pa.table(columns, schema=schema)
    with (
        replacing(path) as aside,
        pq.ParquetWriter(aside, schema, compression="zstd") as file,
    ):
        file.write_table(table)
        if update is not None:
            file.add_key_value_metadata({_UPDATE_KEY: update})


def _cell(value: object) -> object:
    return list(value.items()) if isinstance(value, Mapping) else value


def recorded_steps(run_dir: Path) -> tuple[int, ...]:
    """The steps whose rollouts are on disk, ascending."""
    names = (
        re.fullmatch(r"step-(\d+)\.parquet", p.name) for p in (run_dir / FOLDER).glob("step-*")
    )
    return tuple(sorted(int(m[1]) for m in names if m))


def read_rollouts(run_dir: Path, step: int | None = None) -> tuple[RolloutRow, ...]:
    """The rollouts of ``step`` (the newest recorded one when None).

    Raises:
        DataError: nothing was recorded for that step, or the file cannot be read.
    """
    steps = recorded_steps(run_dir)
    wanted = steps[-1] if step is None and steps else step
    if wanted not in steps:
        have = f"recorded are steps {steps[0]} to {steps[-1]}" if steps else "none are recorded"
        of_step = "" if wanted is None else f" of step {wanted}"
        raise DataError(f"{run_dir / FOLDER}: no rollouts{of_step}; {have}")
    with _opened(rollouts_path(run_dir, wanted)) as file:
        found = file.read().to_pylist()
    return tuple(_from_record(record) for record in found)


def read_update(run_dir: Path, step: int) -> str | None:
    """What was kept of how the weights of ``step`` came about; None in a file that has no such
    thing.

    Raises:
        DataError: the file cannot be read.
    """
    with _opened(rollouts_path(run_dir, step)) as file:
        found: bytes | None = (file.metadata.metadata or {}).get(_UPDATE_KEY.encode())
    return None if found is None else found.decode()


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """The file to read from; what goes wrong in the block is a ``DataError`` with its name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException) as exc:
        why = getattr(exc, "strerror", None) or "it is torn or was altered; bring the file back"
        raise DataError(f"{path} cannot be read as Parquet: {why}") from exc


def _from_record(record: Mapping[str, object]) -> RolloutRow:
    arrays = {
        "prompt_ids": np.int64,
        "token_ids": np.int64,
        "loss_mask": np.bool_,
        "logprobs": np.float32,
        "versions": np.int64,
    }
    typed = dict(record)
    for name, dtype in arrays.items():
        typed[name] = np.asarray(record[name], dtype=dtype)
    typed["reward_parts"] = dict(record["reward_parts"] or ())  # type: ignore[call-overload]  # list of pairs by the schema
    typed["stop_reason"] = StopReason(str(record["stop_reason"]))
    return RolloutRow(**typed)  # type: ignore[arg-type]  # the schema above fixes the type of every column

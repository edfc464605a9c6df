"""Score an answer with the scorer of the reasoning-gym task that its question comes from.

Consumes the columns that ``train_dataset.path: reasoning_gym:NAME`` gives each row: ``answer``,
``metadata`` and ``task``. Rows that were saved by other means work as well: without ``task``, the
name is ``metadata.source_dataset`` and the options are the task's own. Knows nothing of how rows
are made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from offbeat.errors import ConfigError, RewardError

try:
    import reasoning_gym
except ModuleNotFoundError as exc:
    raise ConfigError(
        "the reward offbeat.rewards.reasoning_gym needs the reasoning-gym package, which is not "
        f"installed ({exc}): pip install reasoning-gym (offbeat's extra reasoning-gym)"
    ) from exc


def reward(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    **columns: object,
) -> dict[str, float]:
    """The task's score of the answer, 0 to 1, and ``solved``: 1.0 when it is the full score.

    The answer is what stands in the last ``<answer>...</answer>``, else the whole text, stripped.
    Many tasks give a part of the score for a part of the answer.

    Raises:
        RewardError: the row does not come from reasoning-gym.
    """
    name, options = _task(columns)
    answer = reasoning_gym.utils.extract_answer(completions)
    scorer = _scorer(name, json.dumps(options, sort_keys=True))
    entry = {"question": prompt, "answer": columns["answer"], "metadata": columns["metadata"]}
    score = float(scorer.score_answer(completions.strip() if answer is None else answer, entry))
    return {"reward": score, "solved": float(score >= 1.0)}


def _task(columns: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """Name and options of the task that a row belongs to."""
    metadata, task = columns.get("metadata"), columns.get("task")
    if isinstance(metadata, Mapping) and "answer" in columns:
        if isinstance(task, Mapping) and {"name", "options"} <= set(task):
            return task["name"], task["options"]
        if isinstance(metadata.get("source_dataset"), str):
            return metadata["source_dataset"], {}
    raise RewardError(
        "the reward offbeat.rewards.reasoning_gym scores rows of path: reasoning_gym:NAME, which "
        "have the columns answer, metadata (with source_dataset) and task; this row has "
        f"{', '.join(columns) or 'none'}"
    )


@cache
def _scorer(name: str, options: str) -> Any:
    """The data set whose scorer is asked; ``options`` as JSON text, as some scorers heed them."""
    return reasoning_gym.create_dataset(name, **json.loads(options))

"""Rollouts of a run as a person reads them: chosen, printed, and down to the token on request.

Consumes recorded rollouts; returns text and plain data. Everything that a model, a data set or a
reward function wrote is made harmless for a terminal first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from offbeat.observe.rollouts import RolloutRow, read_rollouts
from offbeat.observe.terminal import harmless, number, table

TokenText = Callable[[int], str]
"""Text of one token id."""


class Choice(StrEnum):
    """Which rollouts of a step to look at: spread evenly, or by reward."""

    SPREAD = "spread"
    BEST = "best"
    WORST = "worst"


def read_samples(
    path: Path, count: int, step: int | None = None, choice: Choice = Choice.SPREAD
) -> tuple[RolloutRow, ...]:
    """``count`` rollouts of ``step`` (default: the newest).

    By reward, those without one come last, and equal ones stay in the order of recording.

    Raises:
        DataError: nothing was recorded for that step.
    """
    rows = read_rollouts(path, step)
    n = min(count, len(rows))
    if choice is Choice.SPREAD:
        return tuple(rows[i * len(rows) // n] for i in range(n))
    sign = -1 if choice is Choice.BEST else 1

    def rank(row: RolloutRow) -> tuple[bool, float]:
        return row.reward is None, sign * (row.reward or 0.0)

    return tuple(sorted(rows, key=rank)[:n])


def written_versions(row: RolloutRow) -> list[int]:
    """The policy versions that wrote tokens of ``row``, ascending."""
    return sorted({int(v) for v in row.versions[row.loss_mask]})


def samples_text(
    rows: Sequence[RolloutRow], *, token_text: TokenText | None = None, limit: int = 2000
) -> str:
    """Prompts, answers and what became of them.

    Args:
        rows: from `read_samples`.
        token_text: given, each answer is followed by a table of its tokens.
        limit: a text longer than this many characters is cut, and says so.
    """
    return "\n\n".join(_sample_text(row, token_text, limit) for row in rows)


def _sample_text(row: RolloutRow, token_text: TokenText | None, limit: int) -> str:
    reward = f"invalid ({row.invalid_reason})" if row.reward is None else f"{row.reward:.3f}"
    versions = ", ".join(str(v) for v in written_versions(row)) or "none"
    lines = [
        f"step {row.step}  group {row.group_id}.{row.sibling}  "
        f"reward {harmless(reward)}{_parts(row.reward_parts)}  "
        f"advantage {number(row.advantage, '+.3f')}",
        f"stop {row.stop_reason}  {len(row.token_ids)} tokens  versions {versions} "
        f"(admitted at {row.admission_version})",
        *_block("prompt", row.prompt, limit),
        *_block("answer", row.answer, limit),
    ]
    return "\n".join([*lines, *(_token_lines(row, token_text) if token_text is not None else [])])


def _parts(parts: Mapping[str, float]) -> str:
    listed = ", ".join(f"{harmless(name)} {value:.3g}" for name, value in parts.items())
    return f" ({listed})" if listed else ""


def _block(title: str, text: str, limit: int) -> list[str]:
    cut = f"\n[{len(text) - limit} more characters]" if len(text) > limit else ""
    lines = (harmless(text[:limit]) + cut).split("\n")
    labels = [title, *[""] * (len(lines) - 1)]
    return [f"  {label:<6} | {line}" for label, line in zip(labels, lines, strict=True)]


def _token_lines(row: RolloutRow, token_text: TokenText) -> list[str]:
    """A row per token after the prompt; what the policy did not write has neither log-prob nor
    version nor advantage.
    """
    cells = [
        (
            str(place),
            str(row.token_ids[place]),
            repr(token_text(int(row.token_ids[place]))),
            *(
                (
                    f"{row.logprobs[place]:.3f}",
                    str(row.versions[place]),
                    number(row.advantage, "+.3f"),
                )
                if row.loss_mask[place]
                else ("-", "-", "-")
            ),
        )
        for place in range(len(row.token_ids))
    ]
    title = ("token", "id", "text", "log-prob", "version", "advantage")
    return [f"  {line}" for line in table(title, cells, left=0)]


def sample_content(row: RolloutRow, token_text: TokenText | None = None) -> dict[str, object]:
    """One rollout as plain data for JSON; with ``token_text`` also its ``tokens``."""
    content: dict[str, object] = {
        "step": row.step,
        "group_id": row.group_id,
        "sibling": row.sibling,
        "prompt": row.prompt,
        "answer": row.answer,
        "reward": row.reward,
        "invalid_reason": row.invalid_reason,
        "reward_parts": dict(row.reward_parts),
        "advantage": row.advantage,
        "stop_reason": row.stop_reason.value,
        "admission_version": row.admission_version,
        "versions": written_versions(row),
    }
    if token_text is not None:
        content["tokens"] = [_token_content(row, i, token_text) for i in range(len(row.token_ids))]
    return content


def _token_content(row: RolloutRow, place: int, token_text: TokenText) -> dict[str, object]:
    token, written = int(row.token_ids[place]), bool(row.loss_mask[place])
    return {
        "id": token,
        "text": token_text(token),
        "logprob": float(row.logprobs[place]) if written else None,
        "version": int(row.versions[place]) if written else None,
        "advantage": row.advantage if written else None,
    }

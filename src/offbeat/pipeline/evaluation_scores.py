"""What an evaluation amounts to: scores of each data set, as JSON with every reward, and as lines.

Pure but for the two functions that write a file, whole or not at all. An invalid reward is counted
and left out of every mean; it is never a zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from offbeat.config import RunConfig
from offbeat.observe.files import replacing
from offbeat.pipeline.estimators import Estimate, estimate, pass_at_k
from offbeat.pipeline.evaluate import Answered, Answers, tokens_of
from offbeat.types import Invalid, Rollout, Scored

STANDARD_ERROR = "analytic over prompts: sample standard deviation / sqrt(prompts)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetScores:
    """One data set.

    ``prompts`` were asked; ``skipped_prompts`` were too long. ``answers`` came; of the answers that
    were asked for, ``valid_rewards`` were scored and ``invalid_rewards`` were not. ``average`` is
    over prompts, of the mean of each one's valid rewards; ``pass_at_k`` over prompts with at least
    k valid rewards, for those prompts that have them: ``Estimate.prompts`` says how many.
    """

    path: str
    prompts: int
    skipped_prompts: int
    answers: int
    valid_rewards: int
    invalid_rewards: int
    average: Estimate
    pass_at_k: Mapping[int, Estimate]
    length_tokens: float
    truncated_fraction: float
    reward_parts: Mapping[str, float]

    @classmethod
    def of(cls, path: str, answers: Answers, ks: Sequence[int], threshold: float) -> DatasetScores:
        """The scores of ``answers``; a reward of ``threshold`` or more is a pass."""
        result = answers.result()
        rewards = [item.rewards for item in answers.items]
        valid = sum(map(len, rewards))
        return cls(
            path=path,
            prompts=result.prompts,
            skipped_prompts=result.skipped,
            answers=result.samples,
            valid_rewards=valid,
            invalid_rewards=answers.asked - valid,
            average=estimate([sum(of_one) / len(of_one) for of_one in rewards if of_one]),
            pass_at_k={k: _pass_at(k, rewards, threshold) for k in ks},
            length_tokens=result.length_tokens,
            truncated_fraction=result.truncated_fraction,
            reward_parts=result.parts,
        )


def _pass_at(k: int, rewards: Sequence[Sequence[float]], threshold: float) -> Estimate:
    passed = [(len(of_one), sum(r >= threshold for r in of_one)) for of_one in rewards]
    return estimate([pass_at_k(n, c, k) for n, c in passed if n >= k])


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of ``model`` on each data set, and the ``answers`` they come from.

    ``threshold`` is None where no pass@k was asked for. The same seed, model, data and machine give
    the same ``to_json`` byte for byte, as long as the rewards are the same.
    """

    model: str
    seed: int
    samples: int
    temperature: float
    max_new_tokens: int
    threshold: float | None
    datasets: Mapping[str, DatasetScores]
    answers: Mapping[str, Answers] = field(repr=False)

    @classmethod
    def of(
        cls,
        cfg: RunConfig,
        paths: Mapping[str, str],
        answers: Mapping[str, Answers],
        *,
        ks: Sequence[int] = (),
        threshold: float = 1.0,
    ) -> Evaluation:
        """Score ``answers``, which were drawn as ``cfg.eval_gconfig`` says."""
        return cls(
            model=cfg.model.path,
            seed=cfg.seed,
            samples=cfg.eval_gconfig.n_samples,
            temperature=cfg.eval_gconfig.temperature,
            max_new_tokens=cfg.eval_gconfig.max_new_tokens,
            threshold=threshold if ks else None,
            datasets={
                name: DatasetScores.of(paths[name], found, ks, threshold)
                for name, found in answers.items()
            },
            answers=answers,
        )

    @property
    def seconds(self) -> float:
        """How long the answers and their rewards took; loading is not in it."""
        return sum(found.seconds for found in self.answers.values())

    def first_invalid(self, name: str) -> str | None:
        """Why the first invalid reward of a data set is none; None when all are valid."""
        reasons = (line.invalid for line in _lines(name, self.answers[name]))
        return next((reason for reason in reasons if reason is not None), None)

    def to_json(self, *, rewards: bool = False) -> bytes:
        """One indented JSON object; ``rewards`` adds every prompt's. What is not there is null."""
        plain = {
            name: getattr(self, name)
            for name in ("model", "seed", "samples", "temperature", "max_new_tokens", "threshold")
        }
        plain["standard_error"] = STANDARD_ERROR
        plain["datasets"] = {
            name: {
                **msgspec.to_builtins(scores),
                **({"rewards": _rewards(self.answers[name])} if rewards else {}),
            }
            for name, scores in self.datasets.items()
        }
        return msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n"

    def write(self, path: Path) -> None:
        """Replace ``path`` by the scores and every prompt's rewards. Raises OSError."""
        with replacing(path) as aside:
            aside.write_bytes(self.to_json(rewards=True))

    def write_answers(self, path: Path) -> None:
        """Replace ``path`` by one JSON line for each answer. Raises OSError."""
        with replacing(path) as aside, aside.open("wb") as file:
            for name, found in self.answers.items():
                for line in _lines(name, found):
                    file.write(_encoded(line) + b"\n")


def _rewards(answers: Answers) -> list[dict[str, object]]:
    """Rows count from 1. An invalid reward, and one of an answer that never came, is null."""
    missing = [None] * answers.n_samples
    return [
        {
            "row": item.prompt.row + 1,
            "rewards": [_value(r) for r in item.rollouts] if item.rollouts else missing,
        }
        for item in answers.items
    ]


def _value(rollout: Rollout) -> float | None:
    return rollout.reward.value if isinstance(rollout.reward, Scored) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLine:
    """One answer, or one prompt without any: then ``invalid`` says why, and the rest is null.

    ``answer`` is the text of all turns, one below the other.
    """

    data: str
    row: int
    sibling: int | None
    prompt: str
    answer: str | None
    reward: float | None
    reward_parts: Mapping[str, float]
    invalid: str | None
    stop_reason: str | None
    tokens: int | None


def _lines(name: str, answers: Answers) -> Iterator[AnswerLine]:
    for item in answers.items:
        if item.error is not None:
            yield _line_without_answer(name, item)
        for rollout in item.rollouts:
            yield _line(name, item, rollout)


def _line(name: str, item: Answered, rollout: Rollout) -> AnswerLine:
    reward = rollout.reward
    return AnswerLine(
        data=name,
        row=item.prompt.row + 1,
        sibling=rollout.sibling,
        prompt=item.prompt.text,
        answer="\n".join(turn.completion.text for turn in rollout.turns),
        reward=_value(rollout),
        reward_parts=reward.parts if isinstance(reward, Scored) else {},
        invalid=reward.reason if isinstance(reward, Invalid) else None,
        stop_reason=rollout.turns[-1].completion.stop_reason.value,
        tokens=tokens_of(rollout),
    )


def _line_without_answer(name: str, item: Answered) -> AnswerLine:
    return AnswerLine(
        data=name,
        row=item.prompt.row + 1,
        sibling=None,
        prompt=item.prompt.text,
        answer=None,
        reward=None,
        reward_parts={},
        invalid=str(item.error),
        stop_reason=None,
        tokens=None,
    )


def _encoded(line: AnswerLine) -> bytes:
    """One line of JSON; half of a surrogate pair, which a row may hold, becomes an escape."""
    return json.dumps(msgspec.to_builtins(line), ensure_ascii=False).encode(
        "utf-8", "backslashreplace"
    )

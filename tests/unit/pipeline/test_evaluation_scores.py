"""What answers amount to: means without invalid rewards, and files that hold every reward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from offbeat.config import RunConfig, from_mapping
from offbeat.data.stream import EVALUATION_GROUP
from offbeat.errors import RolloutError
from offbeat.pipeline.evaluate import Answered, Answers
from offbeat.pipeline.evaluation_scores import DatasetScores, Evaluation
from offbeat.types import (
    Completion,
    Invalid,
    PolicyVersion,
    Prompt,
    Reward,
    Rollout,
    Scored,
    StopReason,
    Turn,
)


def prompt(row: int, text: str = "ask") -> Prompt:
    ids = np.array([1, 2])
    return Prompt(group_id=EVALUATION_GROUP, epoch=0, row=row, token_ids=ids, text=text)


def rollout(asked: Prompt, sibling: int, reward: float | None, stop: StopReason) -> Rollout:
    completion = Completion(
        token_ids=np.array([3, 4, 5]),
        logprobs=np.zeros(3, dtype=np.float32),
        versions=np.zeros(3, dtype=np.int64),
        stop_reason=stop,
        text="tell",
    )
    value: Reward = Invalid(reason="broke") if reward is None else Scored(value=reward)
    turn = Turn(prompt_ids=asked.token_ids, completion=completion)
    return Rollout(sibling=sibling, turns=(turn,), reward=value)


def answered(*rewards: float | None, row: int = 0, text: str = "ask") -> Answered:
    """A prompt whose answers have these rewards; None is invalid."""
    asked = prompt(row, text)
    rollouts = [rollout(asked, i, r, StopReason.STOP) for i, r in enumerate(rewards)]
    return Answered(prompt=asked, rollouts=tuple(rollouts))


def answers(n: int, items: Sequence[Answered], skipped: int = 0) -> Answers:
    return Answers(
        version=PolicyVersion(0), n_samples=n, items=tuple(items), skipped=skipped, seconds=1.0
    )


def evaluation(found: Answers, ks: tuple[int, ...] = ()) -> Evaluation:
    cfg: RunConfig = from_mapping(
        {
            "model": {"path": "m"},
            "train_dataset": {"path": "x.jsonl"},
            "rollout": {"reward_fn": "task:reward"},
            "eval_gconfig": {"n_samples": found.n_samples, "temperature": 1.0},
        }
    )
    return Evaluation.of(cfg, {"toy": "x.jsonl"}, {"toy": found}, ks=ks)


def test_an_invalid_reward_is_counted_and_in_no_mean() -> None:
    found = answers(2, [answered(1.0, None), answered(0.0, 1.0, row=1), answered(None, None)])
    scores = DatasetScores.of("x", found, (1, 2), threshold=1.0)
    assert (scores.answers, scores.valid_rewards, scores.invalid_rewards) == (6, 3, 3)
    assert scores.average.mean == pytest.approx((1.0 + 0.5) / 2)
    assert scores.average.prompts == 2
    assert scores.pass_at_k[1].mean == pytest.approx((1.0 + 0.5) / 2)
    assert (scores.pass_at_k[2].mean, scores.pass_at_k[2].prompts) == (1.0, 1)


def test_a_prompt_without_any_answer_makes_all_its_rewards_invalid() -> None:
    failed = Answered(prompt=prompt(1), error=RolloutError("workflow: no luck"))
    scores = DatasetScores.of("x", answers(2, [answered(1.0, 0.0), failed], skipped=3), (), 1.0)
    assert (scores.prompts, scores.skipped_prompts) == (2, 3)
    assert (scores.answers, scores.valid_rewards, scores.invalid_rewards) == (2, 2, 2)
    assert scores.average.mean == 0.5


def test_a_pass_is_a_reward_of_the_threshold_or_more() -> None:
    found = answers(4, [answered(0.2, 0.5, 0.7, 1.0)])
    for threshold, passes in ((0.2, 4), (0.5, 3), (0.51, 2), (1.0, 1), (1.1, 0)):
        scores = DatasetScores.of("x", found, (1,), threshold)
        assert scores.pass_at_k[1].mean == pytest.approx(passes / 4)


def test_the_file_has_every_reward_by_row_and_null_where_there_is_none(tmp_path: Path) -> None:
    failed = Answered(prompt=prompt(2), error=RolloutError("no luck"))
    found = evaluation(answers(2, [answered(1.0, None), failed]), ks=(1,))
    found.write(tmp_path / "new" / "out.json")
    written = json.loads((tmp_path / "new" / "out.json").read_text())
    toy = written["datasets"]["toy"]
    assert toy["rewards"] == [
        {"row": 1, "rewards": [1.0, None]},
        {"row": 3, "rewards": [None, None]},
    ]
    assert toy["pass_at_k"] == {"1": {"mean": 1.0, "standard_error": None, "prompts": 1}}
    assert (written["samples"], written["threshold"]) == (2, 1.0)
    assert "sample standard deviation" in written["standard_error"]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out.json"]


def test_what_is_printed_is_what_is_written_without_the_rewards(tmp_path: Path) -> None:
    found = evaluation(answers(1, [answered(1.0)]))
    found.write(tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    del written["datasets"]["toy"]["rewards"]
    assert json.loads(found.to_json()) == written
    assert written["threshold"] is None


def test_every_answer_is_a_line_whatever_its_prompt_holds(tmp_path: Path) -> None:
    failed = Answered(prompt=prompt(1), error=RolloutError("no luck"))
    found = evaluation(answers(2, [answered(1.0, None, text="\ud800 é"), failed]))
    found.write_answers(tmp_path / "answers.jsonl")
    lines = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    first, second, third = map(json.loads, lines)
    assert (first["data"], first["row"], first["sibling"]) == ("toy", 1, 0)
    assert (first["prompt"], first["answer"]) == ("\ud800 é", "tell")
    assert (first["reward"], first["tokens"], first["stop_reason"]) == (1.0, 3, "stop")
    assert (second["reward"], second["invalid"]) == (None, "broke")
    assert (third["answer"], third["invalid"]) == (None, "no luck")
    assert found.first_invalid("toy") == "broke"

"""A reward function that is a Python object: what its configuration records, and what that does."""

from __future__ import annotations

import struct
import threading
from pathlib import Path

import pytest

from offbeat.config import RolloutConfig, RunConfig, from_mapping, load, to_yaml
from offbeat.errors import ConfigError
from offbeat.model.init import write_tokenizer
from offbeat.pipeline.preflight import try_reward
from offbeat.pipeline.run import PPOTrainer
from offbeat.rollout.reward import AsyncRewardWrapper
from offbeat.rollout.reward_given import record
from offbeat.rollout.reward_source import configured
from offbeat.types import Scored

BASE = {"model": {"path": "m"}, "train_dataset": {"path": "d.jsonl"}}


def given(completion: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    "cfg",
    [
        BASE,
        {**BASE, "rollout": {"reward_fn": "a:b"}},
        {**BASE, "rollout": RolloutConfig(reward_fn="a:b")},
        from_mapping({**BASE, "rollout": {"reward_fn": "a:b"}}),
    ],
    ids=["left out", "mapping", "section", "configuration"],
)
async def test_a_recorded_function_can_be_read_again_but_not_run(
    cfg: object, tmp_path: Path
) -> None:
    recorded = record(cfg, given)  # type: ignore[arg-type]  # each of what from_config takes
    if not isinstance(recorded, RunConfig):
        recorded = from_mapping(recorded)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(recorded))
    again = load(file)
    assert again == recorded
    score = AsyncRewardWrapper(configured(again.rollout.reward_fn), workers=1)
    with pytest.raises(ConfigError) as caught:
        await score.start()
    await score.aclose()
    first_line = str(caught.value).partition("\n")[0]
    assert "given its reward function in Python, given (test_reward_given.py:" in first_line
    assert "rollout.reward_fn=module:function" in first_line


def test_other_keys_stay_as_they_were() -> None:
    cfg = from_mapping({**BASE, "rollout": {"reward_fn": "a:b", "reward_workers": 3}})
    recorded = record(cfg, given)
    assert isinstance(recorded, RunConfig)
    assert recorded.rollout.reward_workers == 3
    assert recorded.rollout.max_staleness == cfg.rollout.max_staleness


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, object]:
    """A configuration without a reward, beside a model folder without tensors."""
    model = tmp_path / "model"
    model.mkdir()
    write_tokenizer(model)
    (model / "config.json").write_text('{"max_position_embeddings": 64}')
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2=", "answer": ""}\n')
    return {
        "fileroot": str(tmp_path / "runs"),
        "model": {"path": str(model)},
        "train_dataset": {"path": str(tmp_path / "rows.jsonl"), "batch_size": 1},
        "gconfig": {"n_samples": 2, "max_new_tokens": 8},
        "actor": {"ppo_n_minibatches": 1},
    }


async def test_a_closure_is_the_reward_of_a_run(keys: dict[str, object]) -> None:
    bonus = 0.5
    trainer = PPOTrainer.from_config(
        keys, reward_fn=lambda completion, answer: (completion == answer) + bonus
    )
    _, reward = await try_reward(trainer.inputs)
    assert reward == Scored(value=1.5)
    assert "GivenInPython" in to_yaml(trainer.cfg)


def test_what_cannot_be_sent_is_refused_at_once_with_the_alternative(
    keys: dict[str, object],
) -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r'move it to a module and name it as "module:attr"'):
        PPOTrainer.from_config(keys, reward_fn=lambda completion: float(lock.locked()))

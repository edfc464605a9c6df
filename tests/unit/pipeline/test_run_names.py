"""Runs without a name of their own: one folder for each, also within one second."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.config import RunConfig, from_mapping
from offbeat.errors import ConfigError
from offbeat.model.init import write_tokenizer
from offbeat.pipeline.run import PPOTrainer


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """Runs that end with their reward function, which does not exist, at a clock that stands."""
    monkeypatch.setattr(time, "strftime", lambda pattern: "20300101-000000")
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (tmp_path / "model" / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n' * 2)

    def make(trial_name: str | None) -> RunConfig:
        return from_mapping(
            {
                "fileroot": str(tmp_path / "runs"),
                "trial_name": trial_name,
                "model": {"path": str(tmp_path / "model")},
                "train_dataset": {"path": str(tmp_path / "rows.jsonl"), "batch_size": 2},
                "gconfig": {"n_samples": 2, "max_new_tokens": 8},
                "rollout": {"reward_fn": "no_such_module_of_rewards:reward"},
                "actor": {"ppo_n_minibatches": 1},
            }
        )

    return make


async def run(trainer: PPOTrainer) -> Path:
    with pytest.raises(ConfigError, match="no_such_module_of_rewards"):
        await trainer.arun()
    return trainer.run_dir


async def test_unnamed_runs_of_one_second_get_folders_of_their_own(
    configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    # The first two find the name free before either of them takes it.
    together = [PPOTrainer.from_config(configure(None)) for _ in range(2)]
    assert together[0].run_dir == together[1].run_dir
    found = [await run(trainer) for trainer in together]
    found.append(await run(PPOTrainer.from_config(configure(None))))
    names = ["20300101-000000", "20300101-000000-2", "20300101-000000-3"]
    assert [path.name for path in found] == names
    for path in found:
        assert (path / "summary.json").is_file()
        assert f"trial_name: {path.name}" in (path / "config.yaml").read_text()


async def test_of_two_runs_that_were_given_one_name_the_second_is_refused(
    configure: Callable[..., RunConfig],
) -> None:
    first, second = (PPOTrainer.from_config(configure("mine")) for _ in range(2))
    await run(first)
    with pytest.raises(ConfigError, match=r"trial_name: another run has just begun in .*mine"):
        await second.arun()

"""What is made and refused before any process of a run exists."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import yaml

from offbeat.config import RunConfig, load
from offbeat.errors import ConfigError, DataError, ModelError
from offbeat.model.init import write_tokenizer
from offbeat.pipeline.preflight import prepare, try_reward
from offbeat.pipeline.run import PPOTrainer
from offbeat.rollout.rlvr import RLVRWorkflow
from offbeat.types import Scored

TASK = """
def rows(n=10, long=()):
    return [{"prompt": "1" * (30 if i in long else 3) + "=", "number": i} for i in range(n)]

def reward(prompt, completion, prompt_ids, completion_ids, number):
    return {"reward": 0.25, "asked": number}

def none(*texts, **columns):
    return None

def workflow(reward):
    return "not a workflow"

def failing(reward):
    raise KeyError("settings")

value = 3
"""

Configure: TypeAlias = Callable[..., RunConfig]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """A configuration beside a task module and a model folder without tensors; with overrides."""
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (tmp_path / "model" / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    # Another module for each test: modules stay imported.
    task = f"preflight_task_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{task}.py").write_text(TASK)
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "fileroot": str(tmp_path / "runs"),
                "trial_name": "trial",
                "model": {"path": str(tmp_path / "model")},
                "train_dataset": {"path": f"{task}:rows", "batch_size": 4},
                "gconfig": {"n_samples": 2, "max_new_tokens": 8},
                "rollout": {"reward_fn": f"{task}:reward"},
            }
        )
    )

    def make(*overrides: str) -> RunConfig:
        return load(tmp_path / "config.yaml", [o.replace("task:", f"{task}:") for o in overrides])

    return make


@pytest.mark.parametrize(
    ("overrides", "steps", "groups"),
    [
        (["total_train_steps=7"], 7, 28),
        (["total_train_epochs=2"], 5, 20),
        (["total_train_epochs=3"], 8, 30),
        (["total_train_epochs=1", "train_dataset.batch_size=64"], 1, 10),
        (["total_train_steps=1", "train_dataset.batch_size=64"], 1, 64),
    ],
)
def test_the_length_of_a_run_is_a_number_of_groups(
    configure: Configure, overrides: list[str], steps: int, groups: int
) -> None:
    inputs = prepare(configure(*overrides), reward_log=None)
    assert (inputs.steps, inputs.total_groups) == (steps, groups)


def test_the_context_is_the_models_unless_a_shorter_one_is_set(configure: Configure) -> None:
    assert prepare(configure(), reward_log=None).max_len == 64
    assert prepare(configure("model.max_model_len=32"), reward_log=None).max_len == 32
    with pytest.raises(ConfigError, match="max_model_len: 65 is more than the 64 tokens"):
        prepare(configure("model.max_model_len=65"), reward_log=None)


def test_a_stop_id_outside_of_the_vocabulary_is_refused_before_the_run(
    configure: Configure,
) -> None:
    with pytest.raises(ConfigError, match=r"gconfig\.stop_token_ids: 50 is no token .* 0 to 49"):
        prepare(configure("gconfig.stop_token_ids=[3,50]"), reward_log=None)


def test_a_model_that_does_not_tell_its_context_needs_to_be_told(
    configure: Configure, tmp_path: Path
) -> None:
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not say how long a context is; set it"):
        prepare(configure(), reward_log=None)
    assert prepare(configure("model.max_model_len=32"), reward_log=None).max_len == 32


def test_a_missing_model_folder_is_named_with_ways_to_get_one(configure: Configure) -> None:
    with pytest.raises(ModelError, match=r"no folder absent; make .* `offbeat model init absent`"):
        prepare(configure("model.path=absent"), reward_log=None)


def test_sampling_for_training_and_evaluation_draws_from_streams_of_its_own(
    configure: Configure,
) -> None:
    cfg = configure("gconfig.temperature=0.5", "eval_gconfig.max_new_tokens=5", "seed=9")
    inputs = prepare(cfg, reward_log=None)
    assert isinstance(inputs.workflow, RLVRWorkflow)
    assert inputs.workflow.async_reward_fn is inputs.reward
    training, evaluation = inputs.sampling, inputs.eval_sampling
    assert (training.stream, training.seed, training.n_samples) == ("rollout", 9, 2)
    assert training.params.temperature == 0.5
    assert (evaluation.stream, evaluation.seed, evaluation.n_samples) == ("eval", 9, 1)
    assert (evaluation.params.temperature, evaluation.params.max_new_tokens) == (0, 5)


@pytest.mark.parametrize(
    ("workflow", "said"),
    [
        ("task:value", "it must be callable with a reward function"),
        ("task:workflow", "has no method arun_episode"),
        ("task:failing", "with the reward function: KeyError: 'settings'"),
    ],
)
def test_what_is_no_workflow_is_refused(configure: Configure, workflow: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        prepare(configure(f"rollout.workflow={workflow}"), reward_log=None)
    assert str(caught.value).startswith("rollout.workflow: ")


async def test_the_reward_is_tried_on_an_empty_answer_to_a_prompt_that_fits(
    configure: Configure, tmp_path: Path
) -> None:
    cfg = configure(
        "train_dataset.args={n: 3, long: [0]}",
        "train_dataset.max_prompt_len=10",
        "train_dataset.shuffle=false",
    )
    prompt, reward = await try_reward(prepare(cfg, reward_log=tmp_path / "rewards.log"))
    assert prompt.row == 1
    assert reward == Scored(value=0.25, parts={"asked": 1.0})


async def test_a_reward_that_is_no_number_is_refused_with_the_row(configure: Configure) -> None:
    inputs = prepare(configure("rollout.reward_fn=task:none"), reward_log=None)
    with pytest.raises(ConfigError, match=r"rollout\.reward_fn: on an empty answer to row \d+"):
        await try_reward(inputs)


def test_a_data_set_of_which_no_prompt_fits_is_refused_with_the_first(configure: Configure) -> None:
    cfg = configure("train_dataset.max_prompt_len=2")
    with pytest.raises(DataError, match=r"train_dataset: no prompt fits; the first: .* 4 tokens"):
        prepare(cfg, reward_log=None)


def test_a_trainer_is_made_without_writing_anything(configure: Configure, tmp_path: Path) -> None:
    trainer = PPOTrainer.from_config(configure())
    assert trainer.run_dir == tmp_path / "runs" / "offbeat" / "trial"
    assert not trainer.run_dir.exists()
    trainer.run_dir.mkdir(parents=True)
    (trainer.run_dir / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a run already; choose another trial_name"):
        PPOTrainer.from_config(configure())
    clock = PPOTrainer.from_config(configure("trial_name=null"))
    assert clock.cfg.trial_name == clock.run_dir.name != "trial"

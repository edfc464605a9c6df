"""What an evaluation will do, from the words of a command line; nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from offbeat.errors import ConfigError
from offbeat.pipeline.evaluation import EvaluationOptions, plan_evaluation
from offbeat.pipeline.evaluation_target import Target

CONFIG = {
    "model": {"path": "model"},
    "train_dataset": {"path": "train.jsonl", "prompt_template": "{question}"},
    "rollout": {"reward_fn": "task:reward"},
    "gconfig": {"temperature": 0.7},
}
VALIDATION = "valid_dataset={path: 'task:rows', args: {n: 3}, columns: {prompt: q}, limit: 9}"


@pytest.fixture
def target(tmp_path: Path) -> Target:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return Target(config=tmp_path / "config.yaml", model=None)


def model(tmp_path: Path) -> Target:
    return Target(config=None, model=tmp_path / "m")


def test_a_configuration_gives_model_reward_and_its_validation_set(target: Target) -> None:
    plan = plan_evaluation(target, EvaluationOptions(overrides=[VALIDATION]))
    assert list(plan.datasets) == ["valid_dataset"]
    assert plan.datasets["valid_dataset"].args == {"n": 3}
    assert (plan.cfg.model.path, plan.cfg.rollout.reward_fn) == ("model", "task:reward")
    assert (plan.cfg.eval_gconfig.n_samples, plan.cfg.eval_gconfig.temperature) == (1, 0.0)


def test_named_data_sets_take_the_place_of_the_validation_set_and_its_other_keys(
    target: Target,
) -> None:
    options = EvaluationOptions(overrides=[VALIDATION], data={"a": "a.jsonl", "b": "f:g"}, limit=2)
    plan = plan_evaluation(target, options)
    assert {name: d.path for name, d in plan.datasets.items()} == {"a": "a.jsonl", "b": "f:g"}
    for dataset in plan.datasets.values():
        assert (dataset.args, dataset.columns, dataset.limit) == ({}, {"prompt": "q"}, 2)


def test_without_a_validation_set_the_other_keys_are_those_of_training(target: Target) -> None:
    plan = plan_evaluation(target, EvaluationOptions(data={"a": "a.jsonl"}))
    assert plan.datasets["a"].prompt_template == "{question}"


def test_reward_and_checkpoint_take_the_place_of_what_the_configuration_names(
    target: Target, tmp_path: Path
) -> None:
    both = Target(config=target.config, model=tmp_path / "m")
    plan = plan_evaluation(both, EvaluationOptions(data={"a": "a"}, reward="other:score"))
    assert plan.cfg.rollout.reward_fn == "other:score"
    assert plan.cfg.model.path == str(tmp_path / "m")
    assert plan.cfg.config_dir == str(tmp_path)


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({}, 0.0),
        ({"samples": 1}, 0.0),
        ({"samples": 4}, 0.7),
        ({"samples": 4, "temperature": 0.2}, 0.2),
        ({"temperature": 0.2}, 0.2),
        ({"samples": 4, "overrides": ["eval_gconfig.temperature=0.5"]}, 0.5),
    ],
)
def test_several_answers_are_drawn_at_the_temperature_of_training_unless_it_is_set(
    target: Target, options: dict[str, object], temperature: float
) -> None:
    asked = EvaluationOptions(data={"a": "a"}, **options)  # type: ignore[arg-type]  # a test's keywords
    found = plan_evaluation(target, asked).cfg.eval_gconfig
    assert (found.n_samples, found.temperature) == (options.get("samples", 1), temperature)


def test_several_greedy_answers_are_refused(target: Target) -> None:
    options = EvaluationOptions(data={"a": "a"}, samples=4, temperature=0.0)
    with pytest.raises(ConfigError, match=r"4 has no effect: eval_gconfig\.temperature is 0"):
        plan_evaluation(target, options)


def test_pass_at_k_with_fewer_than_k_answers_is_refused_with_the_option(target: Target) -> None:
    options = EvaluationOptions(data={"a": "a"}, samples=4, ks=(1, 8))
    said = r"--k 8: pass@8 needs that many answers .* there are 4; add --samples 8"
    with pytest.raises(ConfigError, match=said):
        plan_evaluation(target, options)


def test_a_configuration_without_validation_set_needs_data(target: Target) -> None:
    with pytest.raises(ConfigError, match=r"valid_dataset: there is none .* --data NAME=PATH"):
        plan_evaluation(target, EvaluationOptions())


def test_a_model_by_itself_needs_data_and_a_reward(tmp_path: Path) -> None:
    for options in (
        EvaluationOptions(),
        EvaluationOptions(data={"a": "a"}),
        EvaluationOptions(reward="task:reward"),
    ):
        with pytest.raises(ConfigError, match=r"--data NAME=PATH, and .* --reward module:function"):
            plan_evaluation(model(tmp_path), options)


def test_a_model_by_itself_takes_overrides_and_looks_up_rewards_in_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = EvaluationOptions(
        data={"a": "a.jsonl"},
        reward="task:reward",
        overrides=["valid_dataset.columns.prompt=q", "seed=7"],
    )
    plan = plan_evaluation(model(tmp_path), options)
    assert plan.datasets["a"].columns == {"prompt": "q"}
    assert (plan.cfg.seed, plan.cfg.config_dir) == (7, str(tmp_path))
    assert plan.cfg.model.path == str(tmp_path / "m")


def test_a_wrong_override_of_a_model_is_named_as_one(tmp_path: Path) -> None:
    options = EvaluationOptions(data={"a": "a"}, reward="task:reward", overrides=["sed=7"])
    with pytest.raises(ConfigError, match=r"sed: unknown key.*\(override 'sed=7'\)"):
        plan_evaluation(model(tmp_path), options)

"""Claims about the sentence that says what limited a run."""

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config import RunConfig, from_mapping
from offbeat.config.schema import paths
from offbeat.observe.limits import (
    Limit,
    LimitedBy,
    RunSetup,
    find_limit,
    overlap_bound,
    rounded_percents,
)
from offbeat.observe.timeline import TimeSplit

ASYNC = RunSetup(
    max_staleness=4,
    cores=2,
    trainer_threads=1,
    generator_threads=1,
    trains_in_bfloat16=False,
    generates_in_bfloat16=False,
    prefix_sharing=True,
    gradient_checkpointing=False,
    prox_pass=True,
)
SYNC = dataclasses.replace(ASYNC, max_staleness=0, trainer_threads=2, generator_threads=2)
PARTS = ("training", "generation", "rewards", "idle", "evaluation", "publishing", "saving", "rest")
KEYS = set(paths(RunConfig))


def split(**parts: float) -> TimeSplit:
    return TimeSplit(**({"starting": 4.0, "ending": 1.0} | dict.fromkeys(PARTS, 0.0) | parts))


def limit_of(
    setup: RunSetup, engine: float | None = 30.0, steps: int = 10, **parts: float
) -> Limit:
    found = find_limit(split(**parts), setup, engine_seconds=engine, steps=steps)
    assert found is not None
    return found


def keys_named(sentence: str) -> list[str]:
    """What stands in the parentheses after each piece of advice."""
    advice = sentence.rpartition("; ")[2]
    return [key for inside in re.findall(r"\(([^)]*)\)", advice) for key in inside.split(", ")]


def test_training_that_never_waits_is_the_limit_and_says_how_idle_generation_was() -> None:
    found = limit_of(ASYNC, engine=39.0, training=78.0, generation=15.0, publishing=5.0, rest=2.0)
    assert (found.what, found.share) == (LimitedBy.TRAINING, 0.78)
    assert found.sentence == (
        "of 100.0 s (start 4.0 s, end 1.0 s): training 78 %, waiting for generation 15 %, "
        "publishing 5 %, the rest 2 %; generation was idle 61 % of it: training is the limit; use "
        "fewer tokens per step (train_dataset.batch_size, gconfig.n_samples, "
        "gconfig.max_new_tokens), bfloat16 (model.dtype), loglinear (actor.prox_logp_method) or "
        "more trainer threads (actor.threads)"
    )


@pytest.mark.parametrize(
    ("parts", "what", "key"),
    [
        ({"training": 10, "generation": 80}, LimitedBy.GENERATION, "generator.slots"),
        ({"training": 10, "rewards": 80}, LimitedBy.REWARDS, "rollout.reward_workers"),
        ({"training": 10, "evaluation": 80}, LimitedBy.EVALUATION, "evaluator.freq_steps"),
        ({"training": 10, "publishing": 80}, LimitedBy.PUBLISHING, "train_dataset.batch_size"),
        ({"training": 10, "saving": 80}, LimitedBy.SAVING, "saver.freq_steps"),
        ({"training": 10, "idle": 80}, LimitedBy.NOTHING, "train_dataset.batch_size"),
        ({"training": 50, "generation": 45}, LimitedBy.NOTHING, "actor.threads"),
        ({"training": 40, "generation": 30, "rewards": 30}, LimitedBy.NOTHING, "actor.threads"),
    ],
)
def test_each_part_can_be_the_limit_and_has_its_own_advice(
    parts: dict[str, float], what: LimitedBy, key: str
) -> None:
    found = limit_of(ASYNC, **parts)
    assert found.what is what
    assert key in found.options
    said = {
        LimitedBy.NOTHING: "nothing single is the limit",
        LimitedBy.REWARDS: "rewards are the limit",
    }.get(what, f"{what} is the limit")
    assert said in found.sentence


def test_trainer_and_engines_that_both_work_all_the_time_share_the_blame() -> None:
    found = limit_of(ASYNC, engine=90.0, training=95.0, generation=5.0)
    assert found.what is LimitedBy.NOTHING
    assert "the machine is the limit" in found.sentence
    assert limit_of(ASYNC, engine=60.0, training=95.0, generation=5.0).what is LimitedBy.TRAINING


def test_run_that_took_turns_says_so_and_what_overlap_would_give() -> None:
    found = limit_of(SYNC, engine=30.0, training=20.0, generation=30.0, rewards=45.0, idle=5.0)
    assert found.overlap_bound == pytest.approx((80 + 20) / (30 + 20))
    assert found.sentence.startswith("generation and training took turns; of 100.0 s")
    assert (
        "overlapping the two would be at most 2.00 times as fast, if the reward processes keep "
        "up, min((M + t)/(G + t), η + 1) with M 8.00 s, G 3.00 s, t 2.00 s per step and η 4; "
        "use asynchronous training (mode=async)"
    ) in found.sentence


def test_overlap_that_would_not_help_is_not_recommended_but_its_bound_is_told() -> None:
    found = limit_of(SYNC, training=20.0, generation=78.0, idle=2.0)
    assert found.what is LimitedBy.GENERATION
    assert "at most 1.02 times as fast, min(" in found.sentence
    assert "mode=async" not in found.options
    assert limit_of(ASYNC, training=20.0, generation=80.0).overlap_bound is None


def test_bound_never_promises_more_than_the_staleness_allows() -> None:
    assert overlap_bound(split(training=1.0, generation=1.0, rewards=98.0), 4) == 5.0


def test_advice_leaves_out_what_is_done_already() -> None:
    done = dataclasses.replace(
        ASYNC, trains_in_bfloat16=True, prox_pass=False, trainer_threads=2, prefix_sharing=True
    )
    assert limit_of(done, training=90.0, generation=10.0).options == (
        "train_dataset.batch_size",
        "gconfig.n_samples",
        "gconfig.max_new_tokens",
    )
    undone = dataclasses.replace(ASYNC, prefix_sharing=False, gradient_checkpointing=True)
    assert {"actor.prefix_sharing", "actor.gradient_checkpointing"} <= set(
        limit_of(undone, training=90.0, generation=10.0).options
    )


def test_every_option_that_any_sentence_names_is_a_key_of_the_configuration() -> None:
    flags = [f.name for f in dataclasses.fields(RunSetup) if f.type == "bool"]
    named: set[str] = set()
    for base, part, value in itertools.product((SYNC, ASYNC), PARTS, (False, True)):
        setup = dataclasses.replace(base, **dict.fromkeys(flags, value), trainer_threads=1)
        setup = dataclasses.replace(setup, generator_threads=1)
        found = limit_of(setup, **({"training": 5.0} | {part: 90.0}))
        assert keys_named(found.sentence) == list(found.options)
        named |= {option.partition("=")[0] for option in found.options}
    assert len(flags) == 5
    assert named <= KEYS
    assert len(named) > 18


@given(st.lists(st.floats(0, 1e6), min_size=8, max_size=8))
def test_percents_of_the_sentence_are_whole_and_add_up(values: list[float]) -> None:
    parts = dict(zip(PARTS, values, strict=True))
    parts["training"] += 1.0
    found = limit_of(ASYNC, **parts)
    total = found.seconds.loop
    percents = rounded_percents({p: v / total for p, v in parts.items()})
    assert sum(percents.values()) == 100
    assert all(abs(percents[p] - 100 * v / total) < 1.001 for p, v in parts.items())
    said = re.findall(r" (\d+) %(?=[,;:])", found.sentence.split("; generation was")[0] + ";")
    assert sum(map(int, said)) == 100


def test_run_without_a_trained_step_has_no_limit() -> None:
    assert find_limit(split(generation=9.0), ASYNC, engine_seconds=9.0, steps=0) is None


def test_run_without_an_engine_says_nothing_about_its_idleness() -> None:
    assert "idle" not in limit_of(ASYNC, engine=None, training=9.0).sentence


def config(**changes: object) -> RunConfig:
    return from_mapping(
        {
            "model": {"path": "m"},
            "train_dataset": {"path": "d.jsonl"},
            "rollout": {"reward_fn": "reward:score"},
            **changes,
        },
        "a test",
    )


def test_setup_carries_what_the_configuration_decides() -> None:
    assert RunSetup.of(config(mode="async"), 2) == ASYNC
    sync = RunSetup.of(config(model={"path": "m", "dtype": "bfloat16"}), 2)
    assert sync == dataclasses.replace(
        SYNC,
        trains_in_bfloat16=True,
        generates_in_bfloat16=True,
        prox_pass=False,
    )
    linear = {"prox_logp_method": "loglinear"}
    assert not RunSetup.of(config(mode="async", actor=linear), 2).prox_pass
    assert not RunSetup.of(config(mode="async", actor={"ppo_n_minibatches": 1}), 2).prox_pass

"""A tiny model, fresh rollouts of it, and trainers that show the gradient they step with."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from offbeat.config import ActorConfig, NormConfig, OptimizerConfig
from offbeat.generate.engine.engine import Engine
from offbeat.model.init import init_model
from offbeat.model.load import load_model
from offbeat.rollout.samples import to_samples
from offbeat.seeds import derive
from offbeat.train.actor import PPOActor
from offbeat.train.engine import SingleDeviceEngine
from offbeat.types import (
    Completion,
    GenerateRequest,
    GroupId,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Scored,
    TrainSample,
    Turn,
)

CPU = torch.device("cpu")
TEMPERATURE = 0.8
MAX_NEW_TOKENS = 12
SIBLINGS = 3

Weights: TypeAlias = dict[str, torch.Tensor]


class ShowingEngine(SingleDeviceEngine):
    """The real engine; keeps a copy of the gradient of every optimizer step and counts passes."""

    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.model = model
        self.gradients: list[Weights] = []
        self.passes = 0
        model.base_model.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.passes += 1

    def optimizer_step(self) -> float:
        named = self.model.named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        return super().optimizer_step()

    def snapshot(self) -> Weights:
        return {name: p.detach().clone() for name, p in self.weights()}


@dataclasses.dataclass
class Trainer:
    """An actor and its engine."""

    actor: PPOActor
    engine: ShowingEngine


def trainer_of(
    model: Any,
    *,
    lr: float = 1e-3,
    compute_dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    total_steps: int = 100,
    optimizer: dict[str, Any] | None = None,
    **actor: Any,
) -> Trainer:
    """A trainer of ``model``; the other keywords are those of the actor's configuration."""
    defaults: dict[str, Any] = {
        "use_decoupled_loss": False,
        "ppo_n_minibatches": 1,
        "max_tokens_per_mb": 200,
        "reward_norm": NormConfig(mean_level="group", std_level="group"),
    }
    step = OptimizerConfig(lr=lr, **(optimizer or {}))
    config = ActorConfig(optimizer=step, **(defaults | actor))
    engine = ShowingEngine(
        model,
        compute_dtype=compute_dtype,
        optimizer=step,
        total_steps=total_steps,
        gradient_checkpointing=gradient_checkpointing,
    )
    ppo = PPOActor(
        engine,
        config,
        temperature=TEMPERATURE,
        max_new_tokens=MAX_NEW_TOKENS,
        seed=3,
        compute_dtype=compute_dtype,
    )
    return Trainer(actor=ppo, engine=engine)


def request(group: int, sibling: int, params: SamplingParams) -> GenerateRequest:
    rng = np.random.default_rng(group)
    return GenerateRequest(
        request_id=f"{group}/{sibling}",
        group_id=GroupId(group),
        sibling=sibling,
        turn=0,
        prompt_ids=rng.integers(4, 10, size=3 + group % 5),
        params=params,
        seed=derive(7, "rollout", group, sibling),
    )


def run(engine: Engine, steps: int | None = None) -> list[tuple[GenerateRequest, Completion]]:
    """Step ``engine`` until it is idle, or at most ``steps`` times."""
    done: list[tuple[GenerateRequest, Completion]] = []
    for _ in itertools.count() if steps is None else range(steps):
        if not (engine.running or engine.waiting):
            break
        done += engine.step()
    return done


def samples_of(done: Sequence[tuple[GenerateRequest, Completion]]) -> list[TrainSample]:
    """Rows as the pipeline makes them; the reward depends on the group and the sibling."""
    samples: list[TrainSample] = []
    for group in sorted({r.group_id for r, _ in done}):
        members = sorted(
            (pair for pair in done if pair[0].group_id == group), key=lambda p: p[0].sibling
        )
        prompt_ids = members[0][0].prompt_ids
        prompt = Prompt(group_id=group, epoch=0, row=group, token_ids=prompt_ids, text="")
        rollouts = tuple(
            Rollout(
                sibling=r.sibling,
                turns=(Turn(prompt_ids=prompt_ids, completion=c),),
                reward=Scored(value=float((group * 5 + r.sibling * 2) % 7)),
            )
            for r, c in members
        )
        version = PolicyVersion(min(int(c.versions.min()) for _, c in members))
        samples += to_samples(
            RolloutGroup(prompt=prompt, rollouts=rollouts, admission_version=version)
        )
    return samples


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 12 tokens' vocabulary: ends of answers are sampled too."""
    path = tmp_path_factory.mktemp("train") / "tiny"
    init_model(path, characters="abcdefgh", hidden=32, intermediate=48, initializer_range=0.2)
    return path


@pytest.fixture(scope="session")
def loaded(tiny: Path) -> Any:
    """The tiny model; copy it, never train it."""
    return load_model(str(tiny), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="session")
def make_trainer(loaded: Any) -> Callable[..., Trainer]:
    """``make_trainer(**keywords of trainer_of)`` for a copy of the tiny model."""

    def make(**keywords: Any) -> Trainer:
        return trainer_of(copy.deepcopy(loaded), **keywords)

    return make


@pytest.fixture(scope="session")
def make_generator(loaded: Any) -> Callable[[], Engine]:
    """An engine that holds the tiny model as version 0."""

    def make() -> Engine:
        model = copy.deepcopy(loaded)
        return Engine(model, slots=5, max_len=64, eos_token_ids=[2], decode=lambda _: "")

    return make


@pytest.fixture(scope="session")
def params() -> SamplingParams:
    return SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=TEMPERATURE)


@pytest.fixture(scope="session")
def rollouts(make_generator: Callable[[], Engine], params: SamplingParams) -> list[TrainSample]:
    """Four groups of three fresh rows of version 0, of different lengths, some of them cut."""
    engine = make_generator()
    for group in range(4):
        for sibling in range(SIBLINGS):
            engine.submit(request(group, sibling, params))
    samples = samples_of(run(engine))
    assert len({len(s.tokens) for s in samples}) > 3
    assert {s.truncated for s in samples} == {True, False}
    return samples


@pytest.fixture(scope="session")
def overtaken(
    make_generator: Callable[[], Engine], params: SamplingParams
) -> Callable[[Weights], list[TrainSample]]:
    """``overtaken(weights)``: rows of which some began under version 0, ended under version 1."""

    def make(weights: Weights) -> list[TrainSample]:
        engine = make_generator()
        keep_on = dataclasses.replace(params, ignore_eos=True)
        for sibling in range(SIBLINGS):
            engine.submit(request(0, sibling, keep_on))
        done = run(engine, steps=4)
        model = engine._model

        def load() -> None:
            model.load_state_dict(weights, strict=False)

        engine.swap_weights(load, PolicyVersion(1))
        for sibling in range(SIBLINGS):
            engine.submit(request(1, sibling, keep_on))
        return samples_of([*done, *run(engine)])

    return make


@pytest.fixture(scope="session")
def one_step_on(make_trainer: Callable[..., Trainer], rollouts: list[TrainSample]) -> Weights:
    """The weights of version 1: one update on the fresh rollouts."""
    trainer = make_trainer(lr=5e-3)
    trainer.actor.update(rollouts, PolicyVersion(1))
    return trainer.engine.snapshot()


@pytest.fixture(scope="session")
def moved(make_trainer: Callable[..., Trainer], one_step_on: Weights) -> Callable[..., Trainer]:
    """``moved(**config)``: a trainer at version 1, so that the fresh rollouts have lag 1."""

    def make(**config: Any) -> Trainer:
        trainer = make_trainer(**config)
        trainer.engine.model.load_state_dict(one_step_on, strict=False)
        trainer.actor.version = PolicyVersion(1)
        return trainer

    return make

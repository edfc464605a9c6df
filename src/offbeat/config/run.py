"""The root of the configuration tree, what is derived from it, and how presets reach it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.config.actor import ActorConfig
from offbeat.config.checks import contradictions
from offbeat.config.dataset import DatasetConfig
from offbeat.config.evaluator import EvaluatorConfig
from offbeat.config.gateway import GatewayConfig
from offbeat.config.generation import GenerationConfig
from offbeat.config.generator import GeneratorConfig
from offbeat.config.model import ModelConfig
from offbeat.config.presets import (
    MODE_PRESETS,
    Algorithm,
    RunMode,
    actor_preset,
    evaluation_preset,
)
from offbeat.config.recover import RecoverConfig
from offbeat.config.rollout import RolloutConfig
from offbeat.config.saver import MegatronEngineConfig, SaverConfig
from offbeat.config.scheduler import SchedulerConfig
from offbeat.config.schema import (
    FieldErrors,
    FolderName,
    NonNegativeInt,
    PositiveInt,
    Problem,
    Section,
    Text,
    filled,
    preset,
    store,
)
from offbeat.config.stats_logger import StatsLoggerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Section):
    """Everything a run is told; presets are resolved on construction."""

    experiment_name: FolderName = "offbeat"
    """Folder of the experiment below ``fileroot``."""

    trial_name: FolderName | None = None
    """Folder of this run; null: from the clock when the run starts."""

    fileroot: Text = "runs"
    """Folder that holds all experiments."""

    seed: NonNegativeInt = 1
    """Every random stream of the run derives from it."""

    mode: RunMode = field(default_factory=preset(RunMode.SYNC))
    """Chooses defaults; null: async when ``actor.use_decoupled_loss`` is true, else sync."""

    algorithm: Algorithm = Algorithm.GRPO
    """Chooses defaults of the objective."""

    total_train_steps: PositiveInt | None = None
    """Length of the run in steps; wins over epochs."""

    total_train_epochs: PositiveInt | None = 1
    """Length of the run in passes over the training data."""

    model: ModelConfig
    train_dataset: DatasetConfig
    valid_dataset: DatasetConfig | None = None
    gconfig: GenerationConfig = field(default_factory=GenerationConfig)
    eval_gconfig: GenerationConfig = field(default_factory=GenerationConfig)
    rollout: RolloutConfig
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    saver: SaverConfig = field(default_factory=SaverConfig)
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    megatron: MegatronEngineConfig = field(default_factory=MegatronEngineConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)

    config_dir: Text | None = field(default=None, compare=False)
    """Folder where ``module:attribute`` is looked up first; null: the configuration file's own."""

    @property
    def plugin_dir(self) -> Path | None:
        """``config_dir`` as a path."""
        return None if self.config_dir is None else Path(self.config_dir)

    @property
    def tickets(self) -> int:
        """L = (η + 1)·g: most groups open at once; η = max_staleness, g = batch_size."""
        return (self.rollout.max_staleness + 1) * self.train_dataset.batch_size

    @property
    def max_concurrent_rollouts(self) -> int:
        """Most requests in flight: as set, else max(slots·replicas, n_samples): one group fits."""
        if self.rollout.max_concurrent_rollouts is not None:
            return self.rollout.max_concurrent_rollouts
        return max(self.generator.slots * self.generator.replicas, self.gconfig.n_samples)

    def concurrent_prompts(self, n_samples: int) -> int:
        """Prompts of which ``n_samples`` answers each fill what may be in flight; at least 1."""
        return -(-self.max_concurrent_rollouts // n_samples)

    def generator_threads(self, cpu_count: int) -> int:
        """CPU threads of one generator: as set, else a share of ``cpu_count``, at least 1.

        max_staleness 0: cpu_count // replicas, because trainer and generators never compute at the
        same time. Otherwise: cpu_count // (replicas + 1).
        """
        if self.generator.threads is not None:
            return self.generator.threads
        processes = self.generator.replicas + (1 if self.rollout.max_staleness > 0 else 0)
        return max(1, cpu_count // processes)

    def trainer_threads(self, cpu_count: int) -> int:
        """CPU threads of the trainer: as set, else a share of ``cpu_count``, at least 1.

        max_staleness 0: all of them. Otherwise: cpu_count // (replicas + 1).
        """
        if self.actor.threads is not None:
            return self.actor.threads
        if self.rollout.max_staleness == 0:
            return max(1, cpu_count)
        return max(1, cpu_count // (self.generator.replicas + 1))

    def _settle(self) -> None:
        if "mode" not in self.given and self.actor.use_decoupled_loss:
            store(self, "mode", RunMode.ASYNC)
        problems: list[Problem] = []
        for name, values in self._presets().items():
            section = getattr(self, name)
            try:
                store(self, name, filled(section, values))
            except FieldErrors as exc:
                problems.extend(problem.under(name) for problem in exc.problems)
        if problems:
            raise FieldErrors.of(problems)

    def _presets(self) -> dict[str, Mapping[str, object]]:
        presets: dict[str, Mapping[str, object]] = dict(MODE_PRESETS[self.mode])
        presets["actor"] = actor_preset(self.mode, self.algorithm, self.actor.reward_norm)
        presets["eval_gconfig"] = evaluation_preset(self.gconfig)
        if self.valid_dataset is not None:
            presets["valid_dataset"] = {"shuffle": False}
        return presets

    def _contradictions(self) -> Iterator[Problem]:
        yield from contradictions(self)

"""Everything of a run that can be made and checked before a worker starts.

Consumes the configuration; produces ``Inputs``: tokenizer, prompt streams, workflow, reward, and
the resolved numbers. Loads no torch, starts no process, writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from offbeat.config import ChatTemplate, DatasetConfig, GenerationConfig, RunConfig
from offbeat.config.plugins import resolve
from offbeat.data.columns import ColumnMap
from offbeat.data.dataset import load_rows
from offbeat.data.stream import PromptOptions, PromptStream
from offbeat.data.tokens import TextCodec
from offbeat.errors import ConfigError, DataError, ModelError, PromptTooLong, boundary
from offbeat.generate.gateway.access import resolve_token
from offbeat.model.check import check_folder, check_vocabulary
from offbeat.pipeline.devices import check_device
from offbeat.pipeline.episodes import SamplingPlan, reward_called
from offbeat.protocols import Workflow
from offbeat.rollout.reward import AsyncRewardWrapper
from offbeat.rollout.reward_failures import TIMEOUT, raised_at
from offbeat.rollout.reward_pool import RewardFailure
from offbeat.rollout.reward_source import configured, load_order
from offbeat.rollout.rlvr import reward_input
from offbeat.types import Invalid, Prompt, Reward, SamplingParams, Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run is made of, before any process exists.

    ``max_len`` is the most tokens of prompt plus answer; ``total_groups`` over ``steps`` batches,
    the last of which may be short.
    """

    codec: TextCodec
    stream: PromptStream
    validation: PromptStream | None
    workflow: Workflow
    reward: AsyncRewardWrapper
    sampling: SamplingPlan
    eval_sampling: SamplingPlan
    max_len: int
    steps: int
    total_groups: int


def prepare(
    cfg: RunConfig, *, reward_log: Path | None, reward_fn: Callable[..., object] | None = None
) -> Inputs:
    """Build the inputs of a run; ``reward_fn`` takes the place of the one that ``cfg`` names.

    Raises:
        ConfigError, DataError, ModelError: what cannot be used, and the way out.
    """
    resolve_token(cfg.gateway.host, cfg.gateway.token, key="gateway.")
    check_device(cfg.model.device)
    codec, max_len = open_text(cfg)
    _check_room("gconfig", cfg.gconfig, max_len)
    _check_stop_ids("gconfig", cfg.gconfig, codec)
    stream = open_stream(cfg, cfg.train_dataset, cfg.gconfig, codec, max_len, "train_dataset")
    first_prompt(stream)
    validation = None
    if cfg.valid_dataset is not None:
        _check_room("eval_gconfig", cfg.eval_gconfig, max_len)
        _check_stop_ids("eval_gconfig", cfg.eval_gconfig, codec)
        validation = open_stream(
            cfg, cfg.valid_dataset, cfg.eval_gconfig, codec, max_len, "valid_dataset"
        )
    reward = open_reward(cfg, reward_log, reward_fn)
    steps, total_groups = _length(cfg, len(stream))
    return Inputs(
        codec=codec,
        stream=stream,
        validation=validation,
        workflow=open_workflow(cfg, reward),
        reward=reward,
        sampling=sampling_plan(cfg, cfg.gconfig, "rollout"),
        eval_sampling=sampling_plan(cfg, cfg.eval_gconfig, "eval"),
        max_len=max_len,
        steps=steps,
        total_groups=total_groups,
    )


def open_text(cfg: RunConfig) -> tuple[TextCodec, int]:
    """The tokenizer of ``model.path``, and the most tokens of prompt plus answer."""
    folder = Path(cfg.model.path)
    with boundary(ModelError, f"model.path: looking at {folder}"):
        check_folder(folder)
    codec = TextCodec.open(folder)
    check_vocabulary(folder, codec.vocab_size)
    return codec, _max_len(cfg, codec)


def open_reward(
    cfg: RunConfig, reward_log: Path | None, given: Callable[..., object] | None = None
) -> AsyncRewardWrapper:
    """The function ``given``, else what ``rollout.reward_fn`` names; loaded when it is first used.

    Raises:
        ConfigError: ``given`` cannot be sent to a reward process.
    """
    if given is not None:
        load_order(given)
    return AsyncRewardWrapper(
        configured(cfg.rollout.reward_fn) if given is None else given,
        timeout_seconds=cfg.rollout.reward_timeout_seconds,
        workers=cfg.rollout.reward_workers,
        search_dir=cfg.plugin_dir,
        log_path=reward_log,
        on_call=reward_called,
    )


def open_stream(
    cfg: RunConfig,
    section: DatasetConfig,
    sampling: GenerationConfig,
    codec: TextCodec,
    max_len: int,
    key: str,
) -> PromptStream:
    """The prompts of one data set; ``key`` is its section's name, for errors."""
    with boundary(DataError, f"{key}.path: reading {section.path}"):
        rows = load_rows(
            section.path,
            args=section.args,
            limit=section.limit,
            search_dir=cfg.plugin_dir,
            key=f"{key}.path",
        )
    chat = {ChatTemplate.AUTO: None, ChatTemplate.ON: True, ChatTemplate.OFF: False}
    options = PromptOptions(
        columns=ColumnMap(
            columns=section.columns,
            prompt_template=section.prompt_template,
            system_prompt=section.system_prompt,
            key=key,
        ),
        shuffle=section.shuffle,
        chat=chat[section.chat_template],
        max_prompt_len=section.max_prompt_len,
        context_len=max_len,
        max_new_tokens=sampling.max_new_tokens,
        overlong_prompt=section.overlong_prompt.value,
    )
    return PromptStream(rows, codec, options, seed=cfg.seed)


def open_workflow(cfg: RunConfig, reward: AsyncRewardWrapper) -> Workflow:
    """The workflow that ``rollout.workflow`` names: a class or function called with the reward."""
    spec = cfg.rollout.workflow
    make = resolve(spec, cfg.plugin_dir, "rollout.workflow")
    if not callable(make):
        raise ConfigError(
            f"rollout.workflow: {spec!r} is {make!r}; it must be callable with a reward function"
        )
    with boundary(ConfigError, f"rollout.workflow: calling {spec} with the reward function"):
        workflow = cast("Callable[[AsyncRewardWrapper], object]", make)(reward)
    if not hasattr(workflow, "arun_episode"):
        raise ConfigError(
            f"rollout.workflow: {spec!r} made {workflow!r}, which has no method arun_episode"
        )
    return cast("Workflow", workflow)


async def try_reward(inputs: Inputs) -> tuple[Prompt, Reward]:
    """Score an empty answer to the first prompt that fits.

    Does the reward function load, and does it return a number?

    Raises:
        ConfigError: it does not; the message has the function's own error, a note its traceback.
    """
    prompt = first_prompt(inputs.stream)
    async with inputs.reward as reward:
        outcome = await reward.score(reward_input(prompt, "", []))
        if not isinstance(outcome, Scored):
            raise _no_reward(prompt, outcome, reward.first_error)
    return prompt, outcome


def _no_reward(prompt: Prompt, outcome: Invalid, failure: RewardFailure | None) -> ConfigError:
    where = f"rollout.reward_fn: on an empty answer to row {prompt.row + 1}: "
    if failure is None:
        return ConfigError(f"{where}{outcome.reason}")
    late = failure.error == TIMEOUT
    way_out = "; make it faster, or raise rollout.reward_timeout_seconds" if late else ""
    error = ConfigError(f"{where}{failure.reason}{raised_at(failure)}{way_out}")
    if failure.traceback:
        error.add_note(f"in the reward process:\n{failure.traceback.rstrip()}")
    return error


def first_prompt(stream: PromptStream) -> Prompt:
    """Row 1, or the first row that fits the context. Raises DataError when none does."""
    error: PromptTooLong | None = None
    for row in range(len(stream)):
        try:
            return stream.evaluation_prompt(row)
        except PromptTooLong as exc:
            error = error or exc
    raise DataError(
        f"train_dataset: no prompt fits; the first: {error}. Raise train_dataset.max_prompt_len or "
        "model.max_model_len, or lower gconfig.max_new_tokens"
    )


def _max_len(cfg: RunConfig, codec: TextCodec) -> int:
    own, wanted = codec.context_length, cfg.model.max_model_len
    if wanted is not None and own is not None and wanted > own:
        raise ConfigError(
            f"model.max_model_len: {wanted} is more than the {own} tokens that {cfg.model.path} "
            "was made for"
        )
    limit = wanted if wanted is not None else own
    if limit is None:
        raise ConfigError(
            f"model.max_model_len: {cfg.model.path}/config.json does not say how long a context "
            "is; set it"
        )
    return limit


def _check_room(section: str, sampling: GenerationConfig, max_len: int) -> None:
    if sampling.max_new_tokens >= max_len:
        raise ConfigError(
            f"{section}.max_new_tokens: {sampling.max_new_tokens} leaves no room for a prompt in "
            f"the model's context of {max_len} tokens; lower it"
        )


def _check_stop_ids(section: str, sampling: GenerationConfig, codec: TextCodec) -> None:
    outside = next((i for i in sampling.stop_token_ids if i >= codec.vocab_size), None)
    if outside is not None:
        raise ConfigError(
            f"{section}.stop_token_ids: {outside} is no token of the model; its ids are 0 to "
            f"{codec.vocab_size - 1}"
        )


def _length(cfg: RunConfig, rows: int) -> tuple[int, int]:
    """Steps and groups of the run."""
    g = cfg.train_dataset.batch_size
    if cfg.total_train_steps is not None:
        return cfg.total_train_steps, cfg.total_train_steps * g
    groups = rows * (cfg.total_train_epochs or 1)
    return -(-groups // g), groups


def sampling_plan(cfg: RunConfig, section: GenerationConfig, stream: str) -> SamplingPlan:
    """How answers are drawn; ``stream`` is rollout or eval."""
    return SamplingPlan(
        stream=stream,
        seed=cfg.seed,
        n_samples=section.n_samples,
        params=SamplingParams(
            max_new_tokens=section.max_new_tokens,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            min_p=section.min_p,
            stop=tuple(section.stop),
            stop_token_ids=tuple(section.stop_token_ids),
            ignore_eos=section.ignore_eos,
        ),
    )

"""The examples that AReaL's users know, run as printed, through ``offbeat.compat.areal``.

Each is taken from the description of AReaL's two modes where that file lies beside the checkout,
and always from an equal text of our own. What an example leaves out comes from the prelude that
stands beside it here: imports that its prose introduces, the required keys of a run, a server on
loopback in place of the host it names.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from offbeat.config import AsyncMode, BehaveImpWeightMode, ProxLogpMethod, RunConfig, RunMode, load
from offbeat.model.init import init_model

SEED = Path(__file__).parents[3] / "shared" / "reference" / "seed-areal-sync-async.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """``marker`` occurs in this example of the document only; ``own`` is our own wording."""

    language: str
    marker: str
    own: str

    def text(self, source: str) -> str:
        """The example from ``source``: the document, or our own text."""
        if source == "own":
            return self.own
        blocks = re.findall(rf"```{self.language}\n(.*?)```", SEED.read_text("utf-8"), re.DOTALL)
        (found,) = [block for block in blocks if self.marker in block]
        return str(found)


SOURCES = ["own", *(["seed"] if SEED.is_file() else [])]

TRAIN = Example(
    language="python",
    marker="PPOTrainer.from_config",
    own="""
from areal.api.cli_args import MegatronEngineConfig, PPOActorConfig, SaverConfig
from areal.trainer.ppo.actor import PPOTrainer

cfg = {
    "saver": SaverConfig(mode="async", freq_steps=1000, freq_epochs=0, freq_secs=0),
    "megatron": MegatronEngineConfig(async_save=True),
    "actor": PPOActorConfig(
        use_decoupled_loss=True,
        prox_logp_method="loglinear",
        behave_imp_weight_mode="token_mask",
        behave_imp_weight_cap=5.0,
    ),
    # … other required fields …
}
trainer = PPOTrainer.from_config(cfg)
trainer.run()
""",
)
REWARD = Example(
    language="python",
    marker="async def fetch_score",
    own="""
import aiohttp
from areal.utils.async_reward_wrapper import AsyncRewardWrapper

async def fetch_score(prompt: str) -> float:
    async with aiohttp.ClientSession() as session:
        async with session.post("https://my-reward/api", json={"prompt": prompt}) as answer:
            return (await answer.json())["score"]

reward_fn = AsyncRewardWrapper(fetch_score)
""",
)
WRAP = Example(
    language="python",
    marker="self.async_reward_fn = AsyncRewardWrapper(self.reward_fn)\n",
    own="self.async_reward_fn = AsyncRewardWrapper(self.reward_fn)\n",
)
AWAIT = Example(
    language="python",
    marker="reward = await self.async_reward_fn(prompt, **kwargs)\n",
    own="reward = await self.async_reward_fn(prompt, **kwargs)\n",
)
RUNNER = Example(
    language="python",
    marker="AsyncTaskRunner(max_concurrency=4)",
    own="""
from areal.infra.async_task_runner import AsyncTaskRunner

runner = AsyncTaskRunner(max_concurrency=4)

@runner.task
async def heavy_compute(x):
    await asyncio.sleep(0.2)
    return x * x

futs = [runner.submit(heavy_compute, i) for i in range(100)]
results = await asyncio.gather(*futs)
""",
)
PROX = Example(
    language="python",
    marker="actor_cfg.should_compute_prox_logp()",
    own="""
actor_cfg = PPOActorConfig(
    use_decoupled_loss=True, prox_logp_method="loglinear", recompute_logprob=False
)
if actor_cfg.should_compute_prox_logp():
    pass
""",
)
SYNC_YAML = Example(
    language="yaml",
    marker="mode: sync",
    own="saver: {mode: sync}\nmegatron: {async_save: false}\nactor: {use_decoupled_loss: false}\n",
)
ASYNC_YAML = Example(
    language="yaml",
    marker="mode: async",
    own="""
saver: {mode: async}
megatron: {async_save: true}
actor:
  use_decoupled_loss: true
  prox_logp_method: loglinear
  behave_imp_weight_mode: token_mask
  behave_imp_weight_cap: 5.0
""",
)

TASK = """
def rows():
    return [{"prompt": f"{i}=", "answer": str(i)} for i in range(8)]


def reward(prompt, completions, prompt_ids, completion_ids, answer, **columns):
    return float(completions[:1] == answer)
"""
REQUIRED = {
    "experiment_name": "seed",
    "trial_name": "run",
    "total_train_steps": 3,
    "model": {"path": "model"},
    "train_dataset": {"path": "task:rows", "batch_size": 4},
    "rollout": {"reward_fn": "task:reward"},
    "gconfig": {"n_samples": 2, "max_new_tokens": 4},
}


def run_script(folder: Path, *parts: str) -> str:
    """What the script made of ``parts`` prints, run as a user of AReaL's names would."""
    script = folder / "script.py"
    script.write_text("\n".join(parts), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "offbeat.compat.areal", str(script)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def reward_server() -> Iterator[str]:
    """Answers ``{"score": length of the prompt}``; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps({"score": len(asked["prompt"])}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("source", SOURCES)
def test_the_training_script_trains_and_saves_asynchronously(source: str, tmp_path: Path) -> None:
    init_model(tmp_path / "model", max_len=32)
    (tmp_path / "task.py").write_text(TASK)
    example = TRAIN.text(source).replace("# … other required fields …", "**other_required_fields,")
    assert "**other_required_fields," in example
    run_script(tmp_path, f"other_required_fields = {REQUIRED!r}", example)
    run = tmp_path / "runs" / "seed" / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 3)
    cfg = load(run / "config.yaml")
    assert (cfg.mode, cfg.rollout.max_staleness) == (RunMode.ASYNC, 4)
    assert (cfg.saver.mode, cfg.saver.freq_steps) == (AsyncMode.ASYNC, 1000)
    assert (run / "checkpoints" / "latest" / "model.safetensors").is_file()


@pytest.mark.parametrize("source", SOURCES)
def test_the_reward_function_asks_a_server(source: str, tmp_path: Path) -> None:
    with reward_server() as address:
        example = REWARD.text(source).replace("https://my-reward", address)
        assert address in example
        printed = run_script(tmp_path, example, 'print((await reward_fn("four")).value)')
    assert printed == "4.0\n"


@pytest.mark.parametrize("source", SOURCES)
def test_a_workflow_wraps_its_reward_function_and_awaits_it(source: str, tmp_path: Path) -> None:
    prelude = """
from types import SimpleNamespace
from areal.utils.async_reward_wrapper import AsyncRewardWrapper

self = SimpleNamespace(reward_fn=lambda prompt, answer: float(prompt == answer))
prompt, kwargs = "same", {"answer": "same"}
"""
    printed = run_script(
        tmp_path, prelude, WRAP.text(source), AWAIT.text(source), "print(reward.value)"
    )
    assert printed == "1.0\n"


@pytest.mark.parametrize("source", SOURCES)
def test_the_task_runner_runs_a_hundred_tasks_four_at_a_time(source: str, tmp_path: Path) -> None:
    prelude = "import asyncio, time\nstarted = time.monotonic()"
    printed = run_script(
        tmp_path,
        prelude,
        RUNNER.text(source),
        "print(results == [i * i for i in range(100)], time.monotonic() - started > 4.9)",
    )
    assert printed == "True True\n"  # 100 tasks of 0.2 s, 4 at a time: no faster than 5 s


@pytest.mark.parametrize("source", SOURCES)
def test_loglinear_needs_no_forward_pass(source: str, tmp_path: Path) -> None:
    prelude = "from areal.api.cli_args import PPOActorConfig"
    printed = run_script(
        tmp_path, prelude, PROX.text(source), "print(actor_cfg.should_compute_prox_logp())"
    )
    assert printed == "False\n"


def loaded(folder: Path, block: str, *overrides: str) -> RunConfig:
    """The configuration of a YAML block with the required keys of a run."""
    file = folder / "config.yaml"
    file.write_text(block)
    required = ("model.path=m", "train_dataset.path=d.jsonl", "rollout.reward_fn=task:reward")
    return load(file, [*required, *overrides])


@pytest.mark.parametrize("source", SOURCES)
def test_the_synchronous_block_selects_synchronous_training(source: str, tmp_path: Path) -> None:
    cfg = loaded(tmp_path, SYNC_YAML.text(source))
    assert (cfg.mode, cfg.rollout.max_staleness) == (RunMode.SYNC, 0)
    assert cfg.saver.mode is AsyncMode.SYNC
    assert not cfg.actor.use_decoupled_loss
    assert not cfg.megatron.async_save


@pytest.mark.parametrize("source", SOURCES)
def test_the_asynchronous_block_selects_asynchronous_training(source: str, tmp_path: Path) -> None:
    cfg = loaded(tmp_path, ASYNC_YAML.text(source))
    assert (cfg.mode, cfg.rollout.max_staleness) == (RunMode.ASYNC, 4)
    assert cfg.saver.mode is AsyncMode.ASYNC
    assert cfg.megatron.async_save
    assert cfg.actor.prox_logp_method is ProxLogpMethod.LOGLINEAR
    assert cfg.actor.behave_imp_weight_mode is BehaveImpWeightMode.TOKEN_MASK
    assert cfg.actor.behave_imp_weight_cap == 5.0


@pytest.mark.parametrize("source", SOURCES)
def test_the_hybrid_saves_in_the_background_of_synchronous_training(
    source: str, tmp_path: Path
) -> None:
    hybrid = ("saver.mode=async", "megatron.async_save=true", "actor.use_decoupled_loss=false")
    cfg = loaded(tmp_path, SYNC_YAML.text(source), *hybrid)
    assert (cfg.mode, cfg.rollout.max_staleness) == (RunMode.SYNC, 0)
    assert (cfg.saver.mode, cfg.megatron.async_save) == (AsyncMode.ASYNC, True)

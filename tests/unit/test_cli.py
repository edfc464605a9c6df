"""The command line as a shell sees it: exit codes, what is printed, and what is left on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from offbeat.cli import app
from offbeat.config import RunConfig, load
from offbeat.config.schema import paths
from offbeat.model.init import init_model

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
HEAVY = {
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "datasets"),
    *("omegaconf", "yaml", "msgspec", "aiohttp", "jinja2", "huggingface_hub"),
}
"""What takes longer to import than all else of ``--help``, which answers in half a second."""

HELP_MODULES = 600
"""It needs about 430."""

TASK = """
from pathlib import Path


def rows(n=4):
    return [{"prompt": f"{i}=", "answer": str(i)} for i in range(n)]


def reward(prompt, completion, prompt_ids, completion_ids, answer, **columns):
    return {"reward": float(completion == answer), "length": len(completion)}


def broken(*texts, **columns):
    raise KeyError("no such answer")


def tripped():
    raise RuntimeError("the disk of the rows is gone")
"""

CONFIG = {
    "experiment_name": "cli",
    "trial_name": "run",
    "total_train_steps": 3,
    "model": {"path": "model"},
    "train_dataset": {"path": "task:rows", "batch_size": 2},
    "rollout": {"reward_fn": "task:reward"},
    "gconfig": {"n_samples": 2, "max_new_tokens": 4},
    "generator": {"threads": 1},
    "actor": {"threads": 1, "ppo_n_minibatches": 1},
}

Offbeat = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "model"
    init_model(folder, layers=1, hidden=16, intermediate=32, heads=2, kv_heads=2, max_len=64)
    return folder


@pytest.fixture
def offbeat_in(model: Path, tmp_path: Path) -> Offbeat:
    """``offbeat ARGUMENTS`` in a folder with a model, a task and ``config.yaml``."""
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "offbeat", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
        )

    return call


def files_in(folder: Path) -> set[str]:
    found = folder.rglob("*")
    return {f.relative_to(folder).as_posix() for f in found if "__pycache__" not in f.parts}


# Help


@pytest.mark.invariant("I16")
def test_help_loads_the_command_line_only() -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = ['offbeat', '--help']\n"
        "try:\n"
        "    runpy.run_module('offbeat', run_name='__main__')\n"
        "except SystemExit:\n"
        "    print(*sys.modules, file=sys.stderr)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    loaded = shown.stderr.split()
    assert "train" in shown.stdout
    assert not HEAVY & {name.partition(".")[0] for name in loaded}
    assert len(loaded) < HELP_MODULES


@pytest.mark.parametrize(
    "verb",
    [
        "train",
        "eval",
        "runs",
        "show",
        "timeline",
        "replay",
        "generate",
        "chat",
        "serve",
        "chaos",
        "config",
        "config show",
        "model",
        "model init",
        "model import",
        "checkpoint",
        "checkpoint ls",
        "checkpoint verify",
    ],
)
def test_every_command_explains_itself(offbeat_in: Offbeat, verb: str) -> None:
    for option in ("--help", "-h"):
        done = offbeat_in(*verb.split(), option)
        assert done.returncode == 0
        assert f"Usage: offbeat {verb}" in done.stdout.replace("python -m offbeat", "offbeat")
        assert done.stderr == ""


def test_no_command_is_missing_from_the_test_above() -> None:
    assert [c.name or c.callback.__name__ for c in app.registered_commands] == [
        "train",
        "eval",
        "runs",
        "show",
        "timeline",
        "replay",
        "generate",
        "chat",
        "serve",
        "chaos",
    ]
    assert [g.name for g in app.registered_groups] == ["config", "model", "checkpoint"]
    groups = {
        "config": ["show"],
        "model": ["init", "import"],
        "checkpoint": ["ls", "verify"],
    }
    for group, verbs in groups.items():
        (found,) = [g.typer_instance for g in app.registered_groups if g.name == group]
        assert [c.name for c in found.registered_commands] == verbs


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Usage: "),
        (("trian", "config.yaml"), "No such command 'trian'"),
        (("train",), "Missing argument"),
        (("train", "config.yaml", "--bogus"), "No such option: --bogus"),
        (("train", "absent.yaml"), "error: absent.yaml: cannot read the configuration file"),
        (("train", "."), "error: .: cannot read the configuration file: Is a directory"),
        (("train", "config.yaml", "modle=sync"), "modle: unknown key; did you mean 'model'?"),
        (("train", "config.yaml", "actor.optimizer.lrr=1"), "did you mean 'lr'?"),
        (("train", "config.yaml", "mode=snyc"), "one of sync, async; did you mean 'sync'?"),
        (("train", "config.yaml", "seed"), "is not of the form key.path=value"),
        (("train", "config.yaml", "seed=1", "seed=2"), "seed is already set by override 'seed=1'"),
        (("train", "config.yaml", "trial_name=../up"), "is not a folder name"),
        (("train", "config.yaml", "model.path=absent"), "offbeat model init absent"),
        (("train", "config.yaml", "train_dataset.path=task:tripped"), "disk of the rows is gone"),
        (("eval", "config.yaml"), "valid_dataset: there is none to evaluate on"),
        (("show", "absent"), "there is no folder absent nor runs/absent"),
        (("show", "latest"), "there is no folder runs"),
        (("show", "model"), "not a run"),
        (("show", "latest", "--samples", "-1"), "--samples"),
        (("config", "show", "config.yaml", "nope=1"), "nope: unknown key"),
        (("model", "init", "model"), "exists and is not empty"),
        (("model", "init", "new", "--hidden", "15"), "hidden 15 is not divisible by heads 4"),
        (("model", "init", "new", "--keep", "--overwrite"), "exclude each other"),
        (("model", "init", "task.py/new"), "creating "),
        (("model", "import", "task.py", "new"), "task.py is not a GGUF file"),
        (("model", "import", "absent.gguf", "new"), "absent.gguf"),
    ],
)
@pytest.mark.invariant("I15")
def test_a_mistake_is_code_2_one_message_and_no_change(
    offbeat_in: Offbeat, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    before = files_in(tmp_path)
    done = offbeat_in(*arguments)
    assert done.returncode == 2, done.stderr
    assert said in (done.stderr if arguments else done.stdout)
    assert "Traceback" not in done.stderr
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("--debug", "train", "absent.yaml"),
        ("train", "--debug", "absent.yaml"),
        ("train", "absent.yaml", "--debug"),
    ],
)
def test_debug_shows_the_traceback_wherever_it_stands_and_keeps_the_code(
    offbeat_in: Offbeat, arguments: tuple[str, ...]
) -> None:
    done = offbeat_in(*arguments)
    assert done.returncode == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.rstrip().split("\n")[-1].startswith("error: absent.yaml: cannot read")


def test_a_folder_that_cannot_be_made_is_found_before_the_run_starts(offbeat_in: Offbeat) -> None:
    for option in ((), ("--dry-run",)):
        done = offbeat_in("train", "config.yaml", *option, "fileroot=task.py/runs")
        assert done.returncode == 2
        said = "error: fileroot: the run folder task.py/runs/cli/run cannot be made: task.py is a"
        assert done.stderr.startswith(said)
        assert done.stdout == ""


def test_a_reader_that_goes_away_is_no_traceback(offbeat_in: Offbeat, tmp_path: Path) -> None:
    command = f"{sys.executable} -m offbeat config show config.yaml | head -n 1"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.startswith("experiment_name: cli")
    assert "Traceback" not in done.stderr


# config show


def test_config_show_prints_every_key_with_its_origin(offbeat_in: Offbeat) -> None:
    done = offbeat_in("config", "show", "config.yaml", "mode=async", "seed=7")
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    # A section that is left out stands there as null, without the keys inside it.
    missing = {key.partition(".")[0] for key in paths(RunConfig)} - {
        key.partition(".")[0] for key in lines
    }
    assert missing == set()
    assert lines["seed"] == "7"
    assert lines["train_dataset.shuffle"].split("  #") == [
        lines["train_dataset.shuffle"].split("  #")[0],
        " default",
    ]
    assert lines["train_dataset.shuffle"].startswith("true")
    assert lines["valid_dataset"].startswith("null")
    assert "preset of mode async" in lines["rollout.max_staleness"]
    assert lines["rollout.max_staleness"].startswith("4")
    assert "not used: total_train_steps wins" in lines["total_train_epochs"]
    assert lines["train_dataset.path"] == "task:rows"


def test_what_config_show_prints_is_the_configuration(offbeat_in: Offbeat, tmp_path: Path) -> None:
    shown = offbeat_in("config", "show", "config.yaml").stdout
    keys = [line.split("  #")[0].rstrip().split(": ", 1) for line in shown.splitlines()]
    cfg = load(tmp_path / "config.yaml")
    for key, text in keys:
        value: object = cfg
        for part in key.split("."):
            value = getattr(value, part)
        plain = list(value) if isinstance(value, tuple) else value
        assert yaml.safe_load(text) == plain or text == str(plain), key


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_can_be_loaded_in_both_modes(recipe: Path, mode: str) -> None:
    cfg = load(recipe, [f"mode={mode}"])
    assert (cfg.rollout.max_staleness > 0) is (mode == "async")
    assert cfg.experiment_name != RunConfig.__dataclass_fields__["experiment_name"].default
    assert cfg.plugin_dir == recipe.parent


def test_there_are_recipes() -> None:
    assert RECIPES


# model


def test_model_init_makes_a_folder_once(offbeat_in: Offbeat, tmp_path: Path) -> None:
    small = ("--layers", "1", "--hidden", "16", "--heads", "2", "--kv-heads", "1")
    made = offbeat_in("model", "init", "new/model", *small)
    assert made.returncode == 0, made.stderr
    assert "parameters" in made.stdout
    weights = tmp_path / "new" / "model" / "model.safetensors"
    first = weights.read_bytes()

    again = offbeat_in("model", "init", "new/model", *small, "--seed", "2")
    assert again.returncode == 2
    kept = offbeat_in("model", "init", "new/model", *small, "--seed", "2", "--keep")
    assert (kept.returncode, kept.stdout) == (0, "new/model is there already\n")
    assert weights.read_bytes() == first

    other = offbeat_in("model", "init", "new/model", *small, "--seed", "2", "--overwrite")
    assert other.returncode == 0, other.stderr
    assert weights.read_bytes() != first
    assert files_in(tmp_path / "new") >= {"model/config.json", "model/tokenizer.json"}
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["model"]


# dry run


def test_a_dry_run_says_what_a_run_would_do_and_writes_nothing(
    offbeat_in: Offbeat, tmp_path: Path
) -> None:
    (tmp_path / "starts.py").write_text(
        "import sys\nfrom pathlib import Path\n\n"
        "def hook(event, arguments):\n"
        "    if event == 'subprocess.Popen':\n"
        "        with Path(__file__).with_name('started.txt').open('a') as log:\n"
        "            log.write(' '.join(map(str, arguments[1])) + '\\n')\n\n"
        "sys.addaudithook(hook)\n\n"
        "from task import rows\n"
    )
    before = files_in(tmp_path)
    done = offbeat_in(
        "train", "config.yaml", "--dry-run", "mode=async", "train_dataset.path=starts:rows"
    )
    assert done.returncode == 0, done.stderr
    assert "4 training rows, 0 validation rows" in done.stdout
    assert "3 steps of 2 prompts x 2 answers" in done.stdout
    assert "max_staleness 4, at most 10 groups open" in done.stdout
    assert "reward      0 for an empty answer" in done.stdout
    started = (tmp_path / "started.txt").read_text()
    assert "offbeat.rollout.reward_worker" in started
    assert "offbeat.launch.worker" not in started
    assert files_in(tmp_path) - before == {"started.txt"}


def test_a_dry_run_shows_the_error_of_the_reward_function_itself(
    offbeat_in: Offbeat, tmp_path: Path
) -> None:
    before = files_in(tmp_path)
    done = offbeat_in("train", "config.yaml", "--dry-run", "rollout.reward_fn=task:broken")
    assert done.returncode == 2
    line = TASK.splitlines().index('    raise KeyError("no such answer")') + 1
    assert f"KeyError: 'no such answer' ({tmp_path / 'task.py'}:{line})" in done.stderr
    assert "Traceback" not in done.stderr
    assert files_in(tmp_path) == before


# show


@pytest.fixture
def fresh_run(tmp_path: Path) -> Path:
    """A run directory as it is before the first step."""
    run = tmp_path / "runs" / "cli" / "fresh"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text("{}\n")
    return run


def test_show_says_of_a_run_without_a_step_that_it_is_unfinished(
    offbeat_in: Offbeat, fresh_run: Path
) -> None:
    before = files_in(fresh_run)
    for name in ("latest", "cli", "cli/fresh", str(fresh_run)):
        done = offbeat_in("show", name)
        assert done.returncode == 0, done.stderr
        assert "unfinished (still running, or killed) after 0 steps" in done.stdout
    assert files_in(fresh_run) == before


def test_show_json_of_a_fresh_run_is_json_with_nulls(offbeat_in: Offbeat, fresh_run: Path) -> None:
    done = offbeat_in("show", "latest", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["status"] == "unfinished"
    assert found["run"] == "runs/cli/fresh"
    assert found["reward"] == {"first": None, "last": None}
    assert found["groups"]["admitted"] == 0


def test_show_samples_of_a_run_without_rollouts_is_code_2(
    offbeat_in: Offbeat, fresh_run: Path
) -> None:
    done = offbeat_in("show", "latest", "--samples", "2")
    assert done.returncode == 2
    assert "no rollouts" in done.stderr


# A whole run


def test_a_run_trains_shows_its_samples_and_evaluates(offbeat_in: Offbeat, tmp_path: Path) -> None:
    trained = offbeat_in("train", "config.yaml")
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.startswith("run folder runs/cli/run\nstep 1/3 ")
    assert "completed after 3 steps" in trained.stdout
    assert "Traceback" not in trained.stderr

    shown = offbeat_in("show", "latest", "--json", "--samples", "3", "--step", "2")
    found = json.loads(shown.stdout)
    assert (found["status"], found["steps"]) == ("completed", 3)
    assert [step for step, _ in found["curves"]["reward"]] == [1, 2, 3]
    assert len(found["samples"]) == 3
    assert {sample["step"] for sample in found["samples"]} == {2}
    assert all(sample["reward_parts"].keys() == {"length"} for sample in found["samples"])
    text = offbeat_in("show", "runs/cli/run", "--samples", "1").stdout
    assert "step 3  group" in text
    assert "prompt |" in text

    again = offbeat_in("train", "config.yaml")
    assert again.returncode == 2
    assert "choose another trial_name" in again.stderr

    checkpoint = "runs/cli/run/checkpoints/latest"
    validation = "valid_dataset={path: 'task:rows', args: {n: 3}}"
    before = files_in(tmp_path)
    scored = offbeat_in("eval", "config.yaml", validation, "--checkpoint", checkpoint, "--json")
    assert scored.returncode == 0, scored.stderr
    result = json.loads(scored.stdout)
    found = result["datasets"]["valid_dataset"]
    assert (found["prompts"], found["skipped_prompts"]) == (3, 0)
    assert (found["valid_rewards"], found["invalid_rewards"]) == (3, 0)
    assert files_in(tmp_path) == before


@pytest.mark.slow
def test_an_evaluation_without_a_valid_reward_fails_with_the_first_reason(
    offbeat_in: Offbeat,
) -> None:
    validation = "valid_dataset={path: 'task:rows', args: {n: 3}}"
    done = offbeat_in("eval", "config.yaml", validation, "rollout.reward_fn=task:broken", "--json")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "none of the 3 answers has a valid reward" in done.stderr
    assert "KeyError: 'no such answer'" in done.stderr

"""What a person gets wrong, by the hundred: the message each must give, and the exit code.

A message has the value that is wrong, the place where it stands (dotted key, file and line) and the
way out. None shows a traceback, leaves a process behind, or changes anything on disk before a run
has started.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from offbeat.model.init import init_model

TASK = """
VALUE = 3


def rows(n=4):
    return [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(n)]


def generated():
    yield {"prompt": "1"}


def tripped():
    raise RuntimeError("the disk of the rows is gone")


def reward(prompt, completions, prompt_ids, completion_ids, answer, **columns):
    return float(completions == answer)
"""

CONFIG: dict[str, Any] = {
    "experiment_name": "bad",
    "trial_name": "run",
    "total_train_steps": 1,
    "model": {"path": "model"},
    "train_dataset": {"path": "rows.jsonl", "batch_size": 2},
    "gconfig": {"n_samples": 2, "max_new_tokens": 4},
    "rollout": {"reward_fn": "task:reward", "reward_workers": 1},
    "generator": {"threads": 1},
    "actor": {"threads": 1, "ppo_n_minibatches": 1},
    "saver": {"at_end": False},
    "scheduler": {"type": "inline"},
}

REWARD_HEAD = """
import os, sys, time

def reward(prompt, completions, prompt_ids, completion_ids, **columns):
"""

PRELOADED = (
    "offbeat.cli",
    "offbeat.config.source",
    "offbeat.observe.show",
    "offbeat.pipeline.run",
    "aiohttp",
    "pydantic.type_adapter",  # for Typer, which imports it when it reads arguments
    "pydantic.json_schema",
)
PRELOADED_FOR_MODELS = (
    *PRELOADED,
    "offbeat.generate.server",
    "offbeat.train.service",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.auto.modeling_auto",
)

SECONDS = 40.0
"""Bound of one command."""

DEBUG_HINT = "(--debug shows the traceback"

Files = Mapping[str, str | bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One bad input: a command in a folder, and what must come of it.

    ``files`` are written over those of a good folder, ``change`` does the rest; ``before`` is
    Python that the command's process runs first. ``starts``: the run begins and then fails, so that
    its folder stays. ``loads``: a model is loaded.
    """

    name: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]
    code: int = 2
    files: Files = field(default_factory=dict)
    change: Callable[[Path], object] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    starts: bool = False
    loads: bool = False


def train(name: str, overrides: str | tuple[str, ...], *says: str, **more: Any) -> Row:
    """``offbeat train config.yaml OVERRIDES``."""
    given = (overrides,) if isinstance(overrides, str) else overrides
    arguments = ("train", "config.yaml", *given)
    return Row(name=name, arguments=arguments, says=says, **more)


def written(name: str, text: str | bytes, *says: str) -> Row:
    """``offbeat train bad.yaml`` where that file has ``text``."""
    return Row(name=name, arguments=("train", "bad.yaml"), says=says, files={"bad.yaml": text})


def rows(*items: object) -> str:
    return "".join(json.dumps(item) + "\n" for item in items)


def data(name: str, content: str | bytes, *says: str, **more: Any) -> Row:
    """A training set with ``content``."""
    return train(name, (), *says, files={"rows.jsonl": content}, **more)


def tried(name: str, body: str, *says: str, overrides: tuple[str, ...] = (), **more: Any) -> Row:
    """A reward function with this body, tried by ``--dry-run``."""
    return train(
        name,
        ("--dry-run", "rollout.reward_fn=bad:reward", *overrides),
        *says,
        files={"bad.py": f"{REWARD_HEAD}    {body}\n"},
        **more,
    )


def config_json(**changes: object) -> Callable[[Path], None]:
    """Change keys of the model's config.json."""

    def change(folder: Path) -> None:
        file = folder / "model" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def cut_short(folder: Path) -> None:
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def without_a_tensor(folder: Path) -> None:
    """The weights without the last tensor, otherwise whole."""
    weights = folder / "model" / "model.safetensors"
    raw = weights.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, tensors = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    begin, _ = header.pop("model.norm.weight")["data_offsets"]
    text = json.dumps(header).encode()
    weights.write_bytes(struct.pack("<Q", len(text)) + text + tensors[:begin])


PORT_TAKEN = """
import socket, sys
sys.holder = socket.create_server(("127.0.0.1", 0))
sys.argv[-1] += str(sys.holder.getsockname()[1])
"""

CONFIGURATION = [
    written("a tab", "model:\n\tpath: model\n", "bad.yaml:2", "'\\t'", "indent with spaces"),
    written(
        "a key twice",
        "seed: 1\nmodel:\n  path: a\n  path: b\n",
        "bad.yaml:4: model.path is already set in line 3",
        "keep one",
    ),
    written("a bracket left open", "seed: [1\nmodel: {}\n", "bad.yaml:2: not valid YAML: expected"),
    written("a colon in a text", "model: a: b\n", "bad.yaml:1", "quote a text that has a colon"),
    written("an alias of nothing", "seed: *n\n", "bad.yaml:1", "'n'", "quote a text that starts"),
    written("two documents", "seed: 1\n---\nseed: 2\n", "bad.yaml:2", "before the line ---"),
    written("a Python object", "seed: !!python/name:os.system\n", "bad.yaml:1", "plain data only"),
    written("a binary file", b"\x00\xff\xfe\x01", "bad.yaml", "not UTF-8 text"),
    written("an empty file", "", "bad.yaml: the configuration file is empty"),
    written("only comments", "# nothing yet\n", "bad.yaml: the configuration file is empty"),
    written("a list", "- model\n", "bad.yaml: a list at top level", "a mapping of sections"),
    written("one word", "hello\n", "bad.yaml: a single value", "a mapping of sections"),
    written(
        "a reference to nothing",
        "model:\n  path: ${home}/model\n",
        "bad.yaml:2: model.path",
        "'home' not found",
        "${section.key}",
    ),
    written(
        "an environment variable that is not set",
        "fileroot: ${oc.env:NO_SUCH_FOLDER}\n",
        "bad.yaml:1: fileroot",
        "NO_SUCH_FOLDER",
        "${oc.env:NAME,DEFAULT}",
    ),
    written("a value left to fill in", "seed: ???\n", "bad.yaml:1: seed: ???", "seed=VALUE"),
    written(
        "required keys missing", "seed: 1\n", "3 problems", "model.path: required, and not set"
    ),
    Row(
        name="no such file",
        arguments=("train", "confg.yaml"),
        says=("confg.yaml", "No such file or directory", "there is config.yaml"),
    ),
    Row(
        name="no file and none to choose",
        arguments=("train", "model/x.yaml"),
        says=("model/x.yaml", "has no YAML file"),
    ),
    Row(
        name="a folder",
        arguments=("train", "."),
        says=(".: cannot read the configuration file: Is a directory", "there is config.yaml"),
    ),
    Row(
        name="a file below a file",
        arguments=("train", "task.py/config.yaml"),
        says=("task.py/config.yaml", "Not a directory"),
    ),
    train("an unknown key", "actor.epz_clip=1", "actor.epz_clip", "'eps_clip'", "(override 'actor"),
    train("an unknown section", "zzz.lr=1", "zzz: unknown key", "the keys here are"),
    train(
        "a key of another section", "actor.max_staleness=2", "did you mean rollout.max_staleness"
    ),
    train("a key set twice", ("seed=1", "seed=2"), "'seed=2'", "already set by override 'seed=1'"),
    train("an override without a value", "seed", "'seed'", "the form key.path=value"),
    train("an override with spaces", "seed = 1", "'seed = 1'", "write 'seed=1', without spaces"),
    train(
        "one item of a list", "gconfig.stop[0]=x", "stop[0]", "a list is set as a whole: 'gconfig"
    ),
    train("a bracket left open in a value", "seed=[1", "'seed=[1'", "close brackets and quotes"),
    train("nothing for a number", "seed=", "seed: null is not an integer >= 0", "override 'seed='"),
    train("a text for a number", "actor.optimizer.lr=fast", "'fast' (str) is not a number >= 0"),
    train("a number for a section", "actor=1", "actor: 1 (int) is not a mapping", "'actor=1'"),
    train("out of range", "train_dataset.batch_size=0", "train_dataset.batch_size: 0", ">= 1"),
    train("an unknown mode", "mode=asynk", "'asynk'", "one of sync, async; did you mean 'async'?"),
    train("a folder name with a slash", "trial_name=a/b", "trial_name: 'a/b'", "a folder name"),
    train("a folder name without end", f"trial_name={'a' * 300}", "trial_name", "200 bytes"),
    train("a folder that no file system takes", f"fileroot={'a' * 300}", "fileroot", "too long"),
    train(
        "an integer without end",
        f"total_train_steps={'9' * 24}",
        "total_train_steps: 999",
        "not an integer >= 1",
        "the largest integer here is 2147483647",
    ),
    train("a number beyond floats", f"actor.optimizer.lr={'9' * 400}", "actor.optimizer.lr: 99"),
    train(
        "a heartbeat without a pause",
        "generator.heartbeat_seconds=1e-9",
        "generator.heartbeat_seconds: 1e-09",
        ">= 0.1",
    ),
    train("too many processes", "generator.replicas=100000", "generator.replicas", "<= 256"),
    train("too many slots", "generator.slots=100000000", "generator.slots", "<= 65536"),
    written("brackets without end", f"seed: {'[' * 3000}\n", "bad.yaml", "nested without end"),
    written("an alias within itself", "model: &a {x: *a}\n", "bad.yaml", "alias (*name)"),
    written("a number of 5000 digits", f"seed: {'9' * 5000}\n", "bad.yaml: not a configuration"),
    train("brackets without end in a value", f"seed={'[' * 3000}", "not valid YAML"),
    train(
        "stale without correction",
        ("mode=async", "actor.use_decoupled_loss=false"),
        "rollout.max_staleness: 4",
        "actor.use_decoupled_loss to true, rollout.max_staleness to 0",
    ),
    train("one sibling", "gconfig.n_samples=1", "gconfig.n_samples: 1 is not >= 2", "raise it or"),
    train(
        "no end",
        ("total_train_steps=null", "total_train_epochs=null"),
        "total_train_steps: null",
        "set one of them",
    ),
    train(
        "linear layers that the trainer cannot take",
        ("model.onednn_linears=true", "model.dtype=bfloat16"),
        "model.onednn_linears: true",
        "model.dtype is bfloat16",
        "leave onednn_linears out",
    ),
    train(
        "an answer longer than the context",
        "gconfig.max_new_tokens=64",
        "gconfig.max_new_tokens: 64 leaves no room",
        "context of 64 tokens; lower it",
    ),
    train("a context longer than the model's", "model.max_model_len=4096", "4096", "64 tokens"),
    train("no such workflow", "rollout.workflow=task:absent", "rollout.workflow", "'absent'"),
    train("a workflow that is none", "rollout.workflow=task:rows", "rollout.workflow"),
]

USAGE = [
    Row(
        name="an unknown verb",
        arguments=("trian", "config.yaml"),
        says=("'trian'", "Did you mean 'train'?", "Usage: "),
    ),
    Row(
        name="no configuration",
        arguments=("train",),
        says=("Missing argument", "Usage: "),
    ),
    Row(
        name="an unknown option",
        arguments=("train", "config.yaml", "--dryrun"),
        says=("--dryrun", "--dry-run"),
    ),
    Row(
        name="an option out of range",
        arguments=("model", "init", "new", "--layers", "0"),
        says=("--layers", "1"),
    ),
]

DATA = [
    data("no rows", "", "train_dataset.path", "'rows.jsonl'", "no rows"),
    data("a line that is not JSON", '{"prompt": "1"}\nhello\n', "rows.jsonl:2", "not JSON"),
    data(
        "a number of 5000 digits in a row",
        f'{{"prompt": "1"}}\n{{"prompt": "1", "n": {"9" * 5000}}}\n',
        "rows.jsonl:2",
        "more than 4300 digits",
        "as a text",
    ),
    data("brackets without end in a row", "[" * 5000, "rows.jsonl:1", "nested too deep"),
    data(
        "half a character",
        '{"prompt": "1"}\n{"prompt": "\\ud800"}\n',
        "rows.jsonl:2",
        "\\ud800 without its other half",
    ),
    train(
        "half a character from a function",
        "train_dataset.path=halves:rows",
        "halves:rows: row 1",
        "U+D800",
        files={"halves.py": "def rows():\n    return [{'prompt': '\\ud800', 'answer': ''}]\n"},
    ),
    data(
        "a key twice in a row",
        '{"prompt": "1", "answer": "2", "answer": "3"}\n',
        "rows.jsonl:1",
        "the key 'answer' twice",
    ),
    data("a line that is no object", rows({"prompt": "1"}, 3), "rows.jsonl:2", "object", "int"),
    data("Latin-1", '{"prompt": "é"}\n'.encode("latin-1"), "rows.jsonl:1", "not UTF-8"),
    data("UTF-16", rows({"prompt": "1"}).encode("utf-16"), "rows.jsonl:1", "not UTF-8"),
    data(
        "no prompt column",
        rows({"question": "1"}),
        "row 1",
        "question",
        "train_dataset.columns: {prompt: ",
    ),
    data(
        "prompt and messages",
        rows({"prompt": "1", "messages": []}),
        "row 1",
        "both 'prompt' and 'messages'",
        "train_dataset.columns",
    ),
    data("a prompt that is a number", rows({"prompt": 3}), "row 1", "'prompt'", "int"),
    data("a message without content", rows({"messages": [{"role": "user"}]}), "row 1", "content"),
    data(
        "messages for a model without a template",
        rows({"messages": [{"role": "user", "content": "1"}]}),
        "row 1",
        "no chat template",
    ),
    data(
        "a column with a reserved name",
        rows({"prompt": "1", "completions": "2"}),
        "row 1",
        "'completions'",
        "train_dataset.columns",
    ),
    data("only long prompts", rows({"prompt": "1" * 100}), "100 tokens", "60", "max_prompt_len"),
    train(
        "a template with an unknown column",
        "train_dataset.prompt_template='What is {question}?'",
        "train_dataset.prompt_template",
        "question",
        "answer",
    ),
    train(
        "a template that does not fit the value",
        "train_dataset.prompt_template='{answer:d}'",
        "train_dataset.prompt_template",
        "'d'",
    ),
    train(
        "a mapped column that is not there",
        "train_dataset.columns={prompt: question}",
        "train_dataset.columns",
        "'question'",
        "prompt, answer",
    ),
    train("no such data", "train_dataset.path=absent.jsonl", "train_dataset.path", "absent.jsonl"),
    train("a path that no file system takes", f"train_dataset.path={'a' * 300}", "too long"),
    train("no such function", "train_dataset.path=task:row", "train_dataset.path", "'row'", "rows"),
    train(
        "no rows from a function",
        ("train_dataset.path=task:rows", "train_dataset.args={n: 0}"),
        "train_dataset.path",
        "task:rows(n=0)",
        "empty",
    ),
    train(
        "an argument it does not know",
        ("train_dataset.path=task:rows", "train_dataset.args={m: 3}"),
        "train_dataset.path",
        "task:rows(m=3)",
        "'m'",
    ),
    train(
        "a function that raises", "train_dataset.path=task:tripped", "train_dataset.path", "disk"
    ),
    train("a generator", "train_dataset.path=task:generated", "train_dataset.path", "list"),
    train(
        "a data set of the hub without a network",
        "train_dataset.path=hub:nobody/nothing",
        "train_dataset.path",
        "nobody/nothing",
        environment={"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": "hf"},
    ),
    train(
        "a data set of the hub without its package",
        "train_dataset.path=hub:nobody/nothing",
        "train_dataset.path",
        "datasets package",
        "pip install datasets",
        before="import sys; sys.modules['datasets'] = None",
    ),
    Row(
        name="an evaluation without data",
        arguments=("eval", "config.yaml"),
        says=("valid_dataset",),
    ),
]

MODEL = [
    train(
        "no model folder", "model.path=absent", "model.path", "absent", "offbeat model init absent"
    ),
    train(
        "a model of the hub", "model.path=some/model", "no folder some/model", "hf download some/"
    ),
    train("a folder name that no file system takes", f"model.path={'a' * 300}", "too long"),
    train("a file", "model.path=task.py", "model.path: task.py is a file", "offbeat model import"),
    train(
        "a folder without a model", "model.path=.", "model.path: . has no config.json", "name the"
    ),
    train(
        "a config.json that is cut short", (), "model/config.json", files={"model/config.json": "{"}
    ),
    train(
        "a config.json that is a list", (), "config.json", "list", files={"model/config.json": "[]"}
    ),
    train(
        "no weights",
        (),
        "model.path: model has no weights",
        "not complete",
        change=lambda folder: (folder / "model" / "model.safetensors").unlink(),
    ),
    train(
        "weights that are cut short",
        (),
        "model/model.safetensors is cut short",
        "bytes",
        "copy or download it again",
        change=cut_short,
    ),
    train(
        "weights that are a web page",
        (),
        "model/model.safetensors",
        "no safetensors file",
        files={"model/model.safetensors": "<html>404</html>"},
    ),
    train(
        "a missing part of the weights",
        (),
        "model.path: model lacks model-00002-of-00002.safetensors",
        "not complete",
        files={
            "model/model.safetensors.index.json": json.dumps(
                {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
            )
        },
    ),
    train(
        "no tokenizer",
        (),
        "model has no tokenizer.json",
        "save_pretrained",
        change=lambda folder: (folder / "model" / "tokenizer.json").unlink(),
    ),
    train("a broken tokenizer", (), "model/tokenizer.json", files={"model/tokenizer.json": "{}"}),
    train(
        "another model's tokenizer",
        (),
        "50 tokens",
        "40 (vocab_size in config.json)",
        "do not belong together",
        change=config_json(vocab_size=40),
    ),
    train(
        "a tensor missing",
        (),
        "model.path: model has no weights for 1 tensors",
        "model.norm.weight",
        change=without_a_tensor,
        starts=True,
        loads=True,
    ),
    train(
        "weights of another shape",
        (),
        "model",
        "size",
        change=config_json(intermediate_size=48),
        starts=True,
        loads=True,
    ),
    train(
        "an unknown architecture",
        (),
        "loading the model at model",
        "nosuch",
        change=config_json(model_type="nosuch"),
        starts=True,
        loads=True,
    ),
    train(
        "a sliding window",
        (),
        "sliding_window=8 (less than the 64 tokens in use)",
        "layer 0",
        change=config_json(
            model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=8
        ),
        starts=True,
        loads=True,
    ),
    train(
        "rotary frequencies that depend on the length",
        (),
        "rope_type=dynamic is not supported",
        change=config_json(
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
        ),
        starts=True,
        loads=True,
    ),
    train(
        "a GPU that is not there",
        ("--dry-run", "model.device=cuda"),
        "model.device: cuda is not there",
        "auto or cpu",
        environment={"CUDA_VISIBLE_DEVICES": ""},
    ),
    Row(
        name="a model folder that exists",
        arguments=("model", "init", "model"),
        says=("model exists and is not empty", "--overwrite"),
    ),
    Row(
        name="a folder that is not a model's",
        arguments=("model", "init", ".", "--overwrite"),
        says=("not a model folder", "choose another"),
    ),
    Row(
        name="a folder below a file", arguments=("model", "init", "task.py/new"), says=("task.py",)
    ),
    Row(
        name="heads that do not fit",
        arguments=("model", "init", "new", "--hidden", "15"),
        says=("hidden 15 is not divisible by heads 4",),
    ),
    Row(
        name="no GGUF file",
        arguments=("model", "import", "absent.gguf", "new"),
        says=("absent.gguf",),
    ),
    Row(
        name="a file that is not GGUF",
        arguments=("model", "import", "task.py", "new"),
        says=("task.py is not a GGUF file",),
    ),
    Row(
        name="GGUF without its package",
        arguments=("model", "import", "m.gguf", "new"),
        says=("gguf package", "pip install gguf"),
        files={"m.gguf": b"GGUF1234"},
        before="import sys; sys.modules['gguf'] = None",
    ),
]

REWARD = [
    train(
        "no reward module",
        "rollout.reward_fn=absent:reward",
        "rollout.reward_fn",
        "'absent'",
        "beside the configuration file",
        starts=True,
    ),
    train(
        "no reward function",
        "rollout.reward_fn=task:rewrad",
        "rollout.reward_fn",
        "'rewrad'",
        "it has",
        "reward",
        starts=True,
    ),
    train(
        "a reward that is a number",
        "rollout.reward_fn=task:VALUE",
        "rollout.reward_fn",
        "3",
        "not callable",
        starts=True,
    ),
    train("a reward without a module", "rollout.reward_fn=reward", "rollout.reward_fn: 'reward'"),
    train(
        "a module that does not compile",
        "rollout.reward_fn=bad:reward",
        "rollout.reward_fn",
        "SyntaxError",
        "bad.py, line 1",
        files={"bad.py": "def reward(:\n"},
        starts=True,
    ),
    train(
        "a module that imports nothing",
        "rollout.reward_fn=bad:reward",
        "rollout.reward_fn",
        "No module named 'numppy'",
        files={"bad.py": "import numppy\n"},
        starts=True,
    ),
    train(
        "a module that exits",
        "rollout.reward_fn=bad:reward",
        "rollout.reward_fn",
        "sys.exit(3)",
        '__name__ == "__main__"',
        files={"bad.py": "import sys\nsys.exit(3)\n"},
        starts=True,
    ),
    train(
        "a reward with other parameters",
        ("--dry-run", "rollout.reward_fn=bad:reward"),
        "rollout.reward_fn",
        files={"bad.py": "def reward(a, b, c):\n    return 1.0\n"},
    ),
    train(
        "a column that rows do not have",
        "--dry-run",
        "rollout.reward_fn",
        "'answer'",
        files={"rows.jsonl": rows({"prompt": "1"})},
    ),
    tried(
        "a reward that raises",
        "raise KeyError('nope')",
        "rollout.reward_fn: on an empty answer to row 1",
        "KeyError: 'nope'",
        "bad.py:5)",
        DEBUG_HINT,
    ),
    tried(
        "a reward of NaN",
        "return float('nan')",
        "rollout.reward_fn",
        "row 1",
        "returned nan",
        "expected a finite number",
    ),
    tried(
        "a reward of nothing",
        "return None",
        "rollout.reward_fn",
        "returned None",
        "a finite number",
    ),
    tried(
        "a reward in words",
        "return 'good'",
        "rollout.reward_fn",
        "returned 'good'",
        "a finite number",
    ),
    tried(
        "a reward that hangs",
        "time.sleep(600)",
        "rollout.reward_fn",
        "timed out after 0.3 s",
        "rollout.reward_timeout_seconds",
        overrides=("rollout.reward_timeout_seconds=0.3",),
    ),
    tried(
        "a reward that calls sys.exit",
        "sys.exit(3)",
        "rollout.reward_fn",
        "SystemExit: 3",
        "bad.py:5)",
    ),
    tried(
        "a reward whose process ends",
        "os._exit(3)",
        "rollout.reward_fn",
        "process died: exit code 3",
    ),
]

ENVIRONMENT = [
    train(
        "a run folder below a file",
        "fileroot=task.py/runs",
        "fileroot",
        "task.py is a file",
        "choose another fileroot",
    ),
    train("a run folder that is a file", (), "runs/bad/run is a file", files={"runs/bad/run": ""}),
    train("a dry run that could not start", ("--dry-run", "fileroot=task.py"), "task.py is a file"),
    train("a run folder that nobody may make", "fileroot=/proc/offbeat", "/proc/offbeat", code=1),
    train(
        "a run that is there",
        (),
        "trial_name: runs/bad/run holds a run already",
        "choose another",
        files={"runs/bad/run/config.yaml": "{}"},
    ),
    train(
        "a disk that is full at the start",
        (),
        "run.db",
        "cannot be written",
        code=1,
        starts=True,
        before="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))",
    ),
    Row(
        name="a port that is taken",
        arguments=("serve", "model", "--port="),
        says=("--port", "in use"),
        before=PORT_TAKEN,
    ),
    train(
        "a gateway port that is taken",
        "gateway.port=",
        "gateway.port: cannot listen at 127.0.0.1 port",
        "choose another, or 0",
        before=PORT_TAKEN,
        starts=True,
    ),
    Row(
        name="a host that others can reach without a token",
        arguments=("serve", "model", "--host", "0.0.0.0"),
        says=("--token",),
    ),
    Row(
        name="an old Python",
        arguments=("--help",),
        says=("Python 3.11 or newer", "3.10", "venv"),
        before="import sys; sys.version_info = (3, 10, 13, 'final', 0)",
    ),
    train(
        "a tracker without its package",
        "stats_logger.wandb={}",
        "stats_logger.wandb",
        "wandb package",
        "pip install wandb",
        before="import sys; sys.modules['wandb'] = None",
    ),
    Row(
        name="a timeline of a run without spans",
        arguments=("timeline", "old", "out.png"),
        says=("old/spans.jsonl: no such file", "hence no picture"),
        files={"old/config.yaml": "{}"},
    ),
    Row(name="no run", arguments=("show", "latest"), says=("latest", "runs", "--fileroot")),
    Row(name="a folder that is no run", arguments=("show", "model"), says=("model: not a run",)),
]

TABLE = [*CONFIGURATION, *USAGE, *DATA, *MODEL, *REWARD, *ENVIRONMENT]
TABLE_BY_NAME = {row.name: row for row in TABLE}
DEBUGGED = ("a key twice", "a prompt that is a number", "no tokenizer", "a reward that raises")


def _cases() -> Iterator[Any]:
    """The table; rows that load a model need torch, which takes longer than all others together."""
    for row in TABLE:
        marks = [pytest.mark.slow] if row.loads else []
        yield pytest.param(row, id=row.name.replace(" ", "-"), marks=marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a command ended; ``code`` is None where it had to be killed."""

    code: int | None
    out: str
    err: str


class Forker:
    """``offbeat`` commands in forks of one process that has imported ``modules``."""

    def __init__(self, *modules: str) -> None:
        script = Path(__file__).with_name("offbeat_forker.py")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, row: Row, *options: str, mark: str = "OFFBEAT_TEST=") -> Done:
        """The command of ``row`` in ``folder``; its processes have ``mark`` as a variable."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        streams = {name: str(folder.parent / name) for name in ("stdout", "stderr")}
        order = {
            **streams,
            "folder": str(folder),
            "environment": {**row.environment, **dict([mark.split("=")])},
            "arguments": [*row.arguments, *options],
            "before": row.before,
            "seconds": SECONDS,
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        code = json.loads(self._process.stdout.readline())["code"]
        out, err = (Path(path).read_text(errors="replace") for path in streams.values())
        return Done(code=code, out=out, err=err)

    def close(self) -> None:
        self._process.communicate(timeout=10)


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    made = Forker(*PRELOADED)
    yield made
    made.close()


@pytest.fixture(scope="module")
def forker_for_models() -> Iterator[Forker]:
    made = Forker(*PRELOADED_FOR_MODELS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad") / "model"
    init_model(folder, layers=1, hidden=16, intermediate=32, heads=2, kv_heads=2, max_len=64)
    return folder


def lay_out(folder: Path, model: Path, row: Row) -> None:
    """Make a good folder, with what is bad in ``row``."""
    shutil.copytree(model, folder / "model")
    good = {
        "config.yaml": yaml.safe_dump(CONFIG),
        "task.py": TASK,
        "rows.jsonl": rows(*({"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4))),
    }
    for name, content in {**good, **row.files}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    if row.change is not None:
        row.change(folder)


def files_in(folder: Path) -> set[str]:
    found = folder.rglob("*")
    return {f.relative_to(folder).as_posix() for f in found if "__pycache__" not in f.parts}


def processes_with(mark: str) -> list[int]:
    """Processes whose environment has ``mark``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.invariant("I15")
@pytest.mark.parametrize("row", list(_cases()))
def test_a_bad_input_is_one_message_an_exit_code_and_nothing_left(
    row: Row, small_model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "folder"
    lay_out(folder, small_model, row)
    before, mark = files_in(folder), f"OFFBEAT_TEST={uuid.uuid4().hex}"
    forker: Forker = request.getfixturevalue("forker_for_models" if row.loads else "forker")
    done = forker.run(folder, row, mark=mark)

    assert done.code == row.code, done.err
    for part in row.says:
        assert part in done.err
    assert "Traceback" not in done.out + done.err
    heads = [line for line in done.err.splitlines() if line.startswith(("error: ", "╭─ Error"))]
    assert len(heads) == 1, done.err
    new = files_in(folder) - before
    assert new == set() or (row.starts and {name.split("/")[0] for name in new} == {"runs"})
    assert processes_with(mark) == []


@pytest.mark.parametrize("row", [TABLE_BY_NAME[name] for name in DEBUGGED], ids=DEBUGGED)
def test_with_debug_the_same_command_shows_the_traceback_and_keeps_its_code(
    row: Row, forker: Forker, small_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    lay_out(folder, small_model, row)
    done = forker.run(folder, row, "--debug")
    assert done.code == row.code
    assert "Traceback (most recent call last)" in done.err
    for part in row.says:
        assert part in done.err or part == DEBUG_HINT


def test_the_table_has_what_the_issue_asks_for() -> None:
    assert len(TABLE) == len(TABLE_BY_NAME) >= 100
    assert {row.code for row in TABLE} == {1, 2}

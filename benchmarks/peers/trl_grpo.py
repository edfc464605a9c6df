"""TRL's `GRPOTrainer` on one task; runs in an environment that has trl and not offbeat.

Consumes a task file (`TASK.json`, see ``TASK_KEYS``) and writes one JSON object per line to its
``out``: first ``{"setup": ...}``, then ``{"step", "time", "reward", "length"}`` for each optimizer
step, ``time`` being CLOCK_MONOTONIC seconds when the new weights are in place.

    python trl_grpo.py TASK.json

Settings that make it as fast as it can be on a CPU, with TRL's own defaults where they are better:
one generation batch and one optimizer step per step (``per_device_train_batch_size`` is the whole
batch, ``steps_per_generation`` and ``gradient_accumulation_steps`` 1), so that old log-probs need
no pass of their own; ``num_iterations`` 1 and ``beta`` 0, so no reference model;
``gradient_checkpointing`` off (TRL's default is on, about 20 % slower); no mixed precision (its
default is bfloat16); SDPA attention; fused AdamW; no data workers, which would take cores; nothing
reported, saved or evaluated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

TASK_KEYS = {
    "model": "folder of the model",
    "rows": "JSON lines: prompt (text or messages) and the columns that the reward takes",
    "reward": "file and function of the reward, as FILE.py:function",
    "out": "file to write",
    "threads": "torch's threads",
    "steps": "optimizer steps",
    "prompts": "prompts of one step",
    "samples": "answers to each prompt",
    "max_new_tokens": "longest answer",
    "temperature": "of sampling",
    "loss_type": "grpo: mean over rows of row means; dapo: mean over tokens",
    "epsilon": "clip width",
    "epsilon_high": "upper clip width or null",
    "entropy_coef": "weight of the entropy bonus",
    "scale_rewards": "group, batch or none",
    "learning_rate": "peak learning rate",
    "lr_scheduler_type": "constant_with_warmup, linear or cosine",
    "warmup_steps": "of the learning rate",
    "weight_decay": "of matrices",
    "adam_beta1": "of AdamW",
    "adam_beta2": "of AdamW",
    "adam_epsilon": "of AdamW",
    "max_grad_norm": "largest gradient norm",
    "seed": "of everything random",
    "micro_batch": "rows of one forward and backward pass",
    "generation": "generate, or continuous for transformers' continuous batching",
}


class Log:
    """Appends lines to a file and remembers the rewards of the step that is under way."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self.rewards: list[float] = []
        self.lengths: list[int] = []

    def write(self, **values: object) -> None:
        """One line."""
        self._file.write(json.dumps(values) + "\n")

    def step_ended(self, step: int) -> None:
        """The line of one step."""
        self.write(
            step=step,
            time=time.monotonic(),
            reward=sum(self.rewards) / len(self.rewards),
            length=sum(self.lengths) / len(self.lengths),
        )
        self.rewards, self.lengths = [], []


def load_reward(spec: str) -> Callable[..., object]:
    """The function that ``FILE.py:name`` means."""
    file, _, name = spec.rpartition(":")
    module_spec = importlib.util.spec_from_file_location("task_reward", file)
    if module_spec is None or module_spec.loader is None:
        raise SystemExit(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return getattr(module, name)


def reward_for_trl(function: Callable[..., object], log: Log) -> Callable[..., list[float]]:
    """``function`` (one answer) as TRL calls rewards (all answers, columns as lists).

    TRL hands no prompt ids to a reward function: they arrive empty.
    """

    def reward(prompts, completions, completion_ids, **columns) -> list[float]:
        own = {k: v for k, v in columns.items() if isinstance(v, list) and len(v) == len(prompts)}
        values = []
        for i, (prompt, completion, ids) in enumerate(
            zip(prompts, completions, completion_ids, strict=True)
        ):
            row = {name: column[i] for name, column in own.items()}
            value = function(text_of(prompt), text_of(completion), [], list(ids), **row)
            values.append(float(value["reward"] if isinstance(value, dict) else value))
        log.rewards += values
        log.lengths += [len(ids) for ids in completion_ids]
        return values

    return reward


def text_of(message: object) -> str:
    """A text, or the content of the last of several messages."""
    return message if isinstance(message, str) else message[-1]["content"]


def settings(task: dict, output_dir: Path) -> dict:
    """Keyword arguments of GRPOConfig."""
    rows = task["prompts"] * task["samples"]
    if rows % task["micro_batch"]:
        raise SystemExit(f"micro_batch {task['micro_batch']} does not divide {rows} rows")
    parts = rows // task["micro_batch"]
    same = (
        *("temperature", "loss_type", "epsilon", "epsilon_high", "entropy_coef", "scale_rewards"),
        *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1"),
        *("adam_beta2", "adam_epsilon", "max_grad_norm", "seed"),
    )
    return {
        **{name: task[name] for name in same},
        "output_dir": str(output_dir),
        "max_steps": task["steps"],
        "per_device_train_batch_size": task["micro_batch"],
        "gradient_accumulation_steps": parts,
        "steps_per_generation": parts,
        "num_generations": task["samples"],
        "max_completion_length": task["max_new_tokens"],
        "use_transformers_continuous_batching": task["generation"] == "continuous",
        "num_iterations": 1,
        "beta": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def run(task: dict) -> None:
    """Train, writing a line per step."""
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    torch.set_num_threads(task["threads"])
    out = Path(task["out"])
    log = Log(out)
    rows = [json.loads(line) for line in Path(task["rows"]).read_text("utf-8").splitlines()]
    chosen = settings(task, out.parent / "trl")
    log.write(
        setup={
            "versions": {
                "trl": trl.__version__,
                "transformers": transformers.__version__,
                "torch": torch.__version__,
                "python": sys.version.split()[0],
            },
            "threads": torch.get_num_threads(),
            "settings": chosen,
        }
    )

    class StepClock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            log.step_ended(state.global_step)

    trainer = trl.GRPOTrainer(
        model=task["model"],
        reward_funcs=reward_for_trl(load_reward(task["reward"]), log),
        args=trl.GRPOConfig(**chosen),
        train_dataset=Dataset.from_list(rows),
        callbacks=[StepClock()],
    )
    dtypes = {str(p.dtype) for p in trainer.model.parameters()}
    if dtypes != {"torch.float32"}:
        raise SystemExit(f"the model was to be float32, it is {dtypes}")
    trainer.train()


def main() -> None:
    """Read the task and run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("task", type=Path, help="TASK.json")
    task = json.loads(parser.parse_args().task.read_text("utf-8"))
    if set(task) != set(TASK_KEYS):
        raise SystemExit(f"keys of the task: missing or unknown {set(task) ^ set(TASK_KEYS)}")
    run(task)


if __name__ == "__main__":
    main()

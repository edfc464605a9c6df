# %% [markdown]
# # Train a tiny model from a notebook
#
# Each `# %%` starts a cell: Jupyter (through jupytext), VS Code and PyCharm show them as such, and
# `python notebook_style.py` runs all. What one sees: a model with random weights learns nine sums
# by heart, in less than a minute on a CPU. The mean reward climbs from less than 0.1 to nearly 1.

# %%
import json
import tempfile
from pathlib import Path

import offbeat
from offbeat.model.init import init_model

folder = Path(tempfile.mkdtemp(prefix="offbeat-notebook-"))
model = init_model(folder / "model", characters="0123456789+=", max_len=16)
print(f"{model.parameters:,} parameters in {model.path}")

# %% [markdown]
# ## Data
#
# One row per line: the model reads `prompt`, the reward function gets the other columns by name.

# %%
rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(3)]
(folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))


# %% [markdown]
# ## Reward
#
# Any function of a cell will do. It runs in a process of its own, with a deadline.


# %%
def reward(prompt, completions, prompt_ids, completion_ids, answer, **columns):
    """One point for the right answer."""
    return float(completions == answer)


# %% [markdown]
# ## Train

# %%
trainer = offbeat.PPOTrainer.from_config(
    {
        "experiment_name": "notebook",
        "fileroot": str(folder / "runs"),
        "mode": "sync",
        "total_train_steps": 60,
        "model": {"path": str(model.path)},
        "train_dataset": {"path": str(folder / "sums.jsonl"), "batch_size": 9},
        "gconfig": {"n_samples": 32, "max_new_tokens": 1},
        "actor": {"ppo_n_minibatches": 1, "entropy_coef": 0.1, "optimizer": {"lr": 2e-3}},
    },
    reward_fn=reward,
)

# %%
# In a notebook an event loop is running already. Write there instead:
# summary = await trainer.arun()
summary = trainer.run()

# %% [markdown]
# ## Look

# %%
print(f"mean reward {summary.reward.first:.2f} at the start, {summary.reward.last:.2f} at the end")
print(f"read answers with: offbeat show {trainer.run_dir} --samples 3")

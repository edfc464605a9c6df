"""Files, overrides and interpolation; what is written is read back equal."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offbeat.config import AsyncMode, ChatTemplate, RunMode, from_mapping, load, to_mapping, to_yaml
from offbeat.errors import ConfigError

BASE = """\
model:
  path: models/tiny
train_dataset:
  path: rows.jsonl
rollout:
  reward_fn: rewards:score
"""

SEED = Path(__file__).parents[3].parent / "shared/reference/seed-areal-sync-async.md"

SYNC_BLOCK = """
saver:
  mode: sync  # the default

megatron:
  async_save: false

actor:
  use_decoupled_loss: false
"""

ASYNC_BLOCK = """
saver:
  mode: async  # or auto

megatron:
  async_save: true

actor:
  use_decoupled_loss: true
  prox_logp_method: loglinear

  behave_imp_weight_mode: token_mask
  behave_imp_weight_cap: 5.0
"""


def seed_blocks() -> tuple[str, str]:
    """The YAML blocks of the reference text, or the same written here when it is not at hand."""
    if not SEED.exists():
        return SYNC_BLOCK, ASYNC_BLOCK
    sync, other = re.findall(r"```yaml\n(.*?)```", SEED.read_text(encoding="utf-8"), re.DOTALL)
    return sync, other


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("blocks", [seed_blocks(), (SYNC_BLOCK, ASYNC_BLOCK)])
def test_the_two_reference_blocks_load_as_they_stand(file, blocks):
    sync, decoupled = (load(file(BASE + block)) for block in blocks)
    assert (sync.mode, sync.rollout.max_staleness, sync.saver.mode) == (RunMode.SYNC, 0, "sync")
    assert (decoupled.mode, decoupled.rollout.max_staleness) == (RunMode.ASYNC, 4)
    assert (decoupled.saver.mode, decoupled.megatron.async_save) == (AsyncMode.ASYNC, True)
    assert decoupled.actor.should_compute_prox_logp() is False
    assert decoupled.actor.behave_imp_weight_cap == 5.0


@pytest.mark.parametrize("block", seed_blocks())
def test_a_reference_block_alone_misses_only_the_required_keys(file, block):
    lines = refusal(file(block)).split("\n")[1:]
    found = [line.split(":")[0].strip() for line in lines]
    assert found == ["model.path", "train_dataset.path", "rollout.reward_fn"]
    assert all("required, and not set" in line for line in lines)


def test_overrides_win_over_the_file_and_are_yaml(file):
    overrides = [
        "actor.optimizer.lr=1e-4",
        "gconfig.stop=['a,b', c]",
        "actor.reward_norm={mean_level: batch}",
        "trial_name='007'",
        "mode=async",
        "actor.c_clip=3",
    ]
    cfg = load(file(BASE + "trial_name: x\n"), overrides)
    assert cfg.actor.optimizer.lr == 1e-4
    assert cfg.gconfig.stop == ("a,b", "c")
    assert cfg.actor.reward_norm.mean_level == "batch"
    assert (cfg.trial_name, cfg.mode, cfg.actor.c_clip) == ("007", RunMode.ASYNC, 3.0)


def test_null_override_gives_a_key_back_to_its_preset(file):
    path = file(BASE + "mode: async\nsaver: {mode: sync}\n")
    assert load(path, ["saver.mode=null"]).saver.mode is AsyncMode.ASYNC


def test_interpolation_is_resolved_after_the_overrides(file):
    path = file(
        BASE + "gconfig: {max_new_tokens: 16}\ngenerator: {slots: '${gconfig.max_new_tokens}'}\n"
    )
    assert load(path).generator.slots == 16
    assert load(path, ["gconfig.max_new_tokens=24"]).generator.slots == 24


def test_section_with_nothing_below_it_is_left_out(file):
    assert load(file(BASE + "saver:\n")) == load(file(BASE))


def test_unquoted_on_and_off_are_understood(file):
    path = file(BASE.replace("rows.jsonl", "rows.jsonl\n  chat_template: off"))
    assert load(path).train_dataset.chat_template is ChatTemplate.OFF


def test_config_dir_is_the_folder_of_the_file_and_survives_a_copy_of_the_resolved_file(
    file, tmp_path
):
    cfg = load(file(BASE))
    assert cfg.plugin_dir == tmp_path.resolve()
    assert cfg == from_mapping(to_mapping(cfg))
    moved = tmp_path / "elsewhere.yaml"
    moved.write_text(to_yaml(cfg))
    assert load(moved).plugin_dir == tmp_path.resolve()


@pytest.mark.parametrize(
    "extra",
    [
        "",
        "mode: async\n",
        "algorithm: rloo\nactor: {reward_norm: {mean_level: batch}}\n",
        "actor: {use_decoupled_loss: true, behave_imp_weight_mode: disabled}\n",
        "saver: {mode: async}\nvalid_dataset: {path: v.jsonl}\nevaluator: {freq_steps: 3}\n",
        "total_train_steps: 3\ntotal_train_epochs: null\n",
        "actor: {use_decoupled_loss: true}\nrollout: {reward_fn: a:b, max_head_offpolicyness: 2}\n",
        "eval_gconfig: {temperature: 0.5, n_samples: 4, top_p: 0.9}\ngconfig: {stop: ['off']}\n",
        "train_dataset: {path: m:f, args: {a: [1, {b: null}], t: 'yes'}, columns: {prompt: q}}\n",
    ],
)
def test_resolved_configuration_reloads_equal(file, extra):
    own = set(re.findall(r"^(\w+):", extra, re.MULTILINE))
    sections = re.findall(r"^\w+:\n(?:  .*\n)+", BASE, re.MULTILINE)
    kept = [text for text in sections if text.partition(":")[0] not in own]
    cfg = load(file("".join(kept) + extra))
    again = load(file(to_yaml(cfg)))
    assert again == cfg
    assert to_yaml(again) == to_yaml(cfg)


@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet="ab ${}\\:'\"#\n-?é", min_size=1))
def test_any_string_survives_writing_and_reading(tmp_path_factory, text):
    assume(text.strip() and text != "???")  # ??? is how OmegaConf writes "must be set"
    cfg = from_mapping(
        {
            "model": {"path": text},
            "train_dataset": {"path": "m:f", "args": {"x": text}, "system_prompt": text},
            "rollout": {"reward_fn": "r:f"},
        }
    )
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(to_yaml(cfg), encoding="utf-8")
    assert load(path) == cfg


def test_problem_says_in_which_line_or_override_it_stands(file):
    path = file(BASE + "actor:\n  epz_clip: 0.3\n")
    assert f"did you mean 'eps_clip'? ({path}:8)" in refusal(path)
    text = refusal(file(BASE), "actor.eps_clip=9")
    assert "9 (int) is not a number > 0 and <= 1 (override 'actor.eps_clip=9')" in text
    text = refusal(file(BASE + "gconfig:\n  stop:\n    - a\n    - 5\n"))
    assert f"gconfig.stop[1]: 5 (int) is not a string that is not empty ({path}:10)" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the configuration file is empty"),
        ("# only a comment\n", "the configuration file is empty"),
        ("- a\n- b\n", "a list at top level; expected a mapping"),
        ("hello\n", "a single value at top level; expected a mapping"),
        ("model:\n  path: [1, 2\n", "run.yaml:3: not valid YAML"),
        ("model:\n\tpath: x\n", "run.yaml:2: not valid YAML"),
        ("seed: 1\nseed: 2\n", "run.yaml:2: seed is already set in line 1; keep one"),
        ("seed: ${nothing.here}\n", "'nothing.here' not found"),
        ("seed: ???\n", "seed"),
        ("null: 1\n", "not a configuration: Incompatible key type"),
        ("seed: '${'\n", "run.yaml: "),
    ],
)
def test_unreadable_file_is_a_config_error(file, text, says):
    assert says in refusal(file(text))


def test_missing_file_and_folder_are_config_errors(tmp_path):
    assert "no.yaml: cannot read the configuration file: No such file" in refusal(
        tmp_path / "no.yaml"
    )
    assert "Is a directory" in refusal(tmp_path)


def test_file_that_is_not_text_is_a_config_error(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"seed: \xff\xfe\n")
    assert "not UTF-8 text" in refusal(path)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["foo"], "override 'foo' is not of the form key.path=value"),
        (["=3"], "override '=3' is not of the form key.path=value"),
        (["a..b=3"], "override 'a..b=3' is not of the form key.path=value"),
        (["seed=1", "mode=sync", "seed=2"], "seed is already set by override 'seed=1'"),
        (["seed=1", "seed=1"], "seed is already set by override 'seed=1'"),
        (["gconfig.stop=[a"], "override 'gconfig.stop=[a': the value is not valid YAML"),
        (["actor.epz_clip=0.1"], "did you mean 'eps_clip'? (override 'actor.epz_clip=0.1')"),
        (["model=[1]"], "override 'model=[1]' does not fit what the file has there"),
        (["gconfig.stop.0=x"], "is not a list, each item a string that is not empty (override "),
        (["seed=${nope}"], "'nope' not found"),
        (["actor=5"], "actor: 5 (int) is not a mapping (override 'actor=5')"),
    ],
)
def test_bad_override_is_a_config_error(file, overrides, says):
    assert says in refusal(file(BASE), *overrides)


@pytest.mark.invariant("I16")
def test_importing_and_loading_touches_neither_torch_nor_omegaconf_early(file):
    code = (
        "import sys\n"
        "import offbeat.config as c\n"
        "early = {'torch', 'transformers', 'omegaconf', 'yaml', 'numpy'} & set(sys.modules)\n"
        "assert not early, early\n"
        f"c.to_yaml(c.load({str(file(BASE))!r}))\n"
        "late = {'torch', 'transformers'} & set(sys.modules)\n"
        "assert not late, late\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


@pytest.mark.invariant("I16")
def test_import_takes_little_processor_time():
    code = (
        "import time\n"
        "start = time.process_time()\n"
        "import offbeat.config\n"
        "print(time.process_time() - start)\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
        for _ in range(3)
    ]
    assert min(float(run.stdout) for run in runs) < 0.06

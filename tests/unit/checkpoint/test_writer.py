"""A written folder is complete and proves it; what is not is refused by name, also after kills."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from offbeat.checkpoint.folders import latest, step_folder, step_folders, sweep
from offbeat.checkpoint.manifest import SaveManifest, is_good, load_manifest, verify
from offbeat.checkpoint.writer import write_hf_folder
from offbeat.errors import CheckpointError, CorruptCheckpoint
from offbeat.types import PolicyVersion, WeightUpdate
from offbeat.weights.memory import MemoryPublisher

MakeWeights = Callable[..., WeightUpdate]
SAVE = SaveManifest(step=10, version=PolicyVersion(10), config_digest="abc")


def test_folder_has_template_weights_and_manifest_but_no_old_weights(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    out = tmp_path / "out" / "step-000010"
    update = make_weights(10)
    written = write_hf_folder(update, template, out, SAVE)
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*.*")) == [
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert verify(out) == load_manifest(out) == written
    assert written.save == SAVE
    assert written.files["model.safetensors"].digest == update.digest
    assert (out / "model.safetensors").read_bytes() == Path(update.uri).read_bytes()


def test_config_names_the_dtype_of_the_weights(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    out = tmp_path / "step-000010"
    write_hf_folder(make_weights(10), template, out, SAVE)
    assert json.loads((out / "config.json").read_text()) == {"model_type": "x", "dtype": "float32"}


def test_transformers_loads_the_folder_bit_for_bit(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        dtype=torch.bfloat16,
    )
    model = LlamaForCausalLM(config).float()
    config.save_pretrained(tmp_path / "template")
    with MemoryPublisher(model.named_parameters()) as publisher:
        update = publisher.publish(PolicyVersion(10))
        write_hf_folder(update, tmp_path / "template", tmp_path / "out", SAVE)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    for name, p in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), p)
    assert (
        load_file(tmp_path / "out" / "model.safetensors").keys()
        == dict(model.named_parameters()).keys()
    )


def test_source_that_is_not_the_announced_one_is_refused(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    announced = make_weights(10)
    overwritten = make_weights(11)
    with pytest.raises(CheckpointError, match=rf"{overwritten.digest}, .* {announced.digest}"):
        write_hf_folder(announced, template, tmp_path / "out", SAVE)
    with pytest.raises(CheckpointError, match="bytes"):
        write_hf_folder(dataclasses.replace(announced, nbytes=9), template, tmp_path / "out", SAVE)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_template_without_config_is_refused(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    (template / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        write_hf_folder(make_weights(10), template, tmp_path / "out", SAVE)


def test_one_flipped_bit_in_any_file_is_named(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    out = tmp_path / "step-000010"
    write_hf_folder(make_weights(10), template, out, SAVE)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) == 6
    for path in files:
        good = path.read_bytes()
        for position in (0, len(good) // 2, len(good) - 2):
            bad = bytearray(good)
            bad[position] ^= 1
            path.write_bytes(bad)
            with pytest.raises(CorruptCheckpoint, match=path.name):
                verify(out)
        path.write_bytes(good)
    assert is_good(out)


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", "config.json"])
def test_missing_or_truncated_file_is_named(
    tmp_path: Path, template: Path, make_weights: MakeWeights, name: str
) -> None:
    out = tmp_path / "step-000010"
    write_hf_folder(make_weights(10), template, out, SAVE)
    content = (out / name).read_bytes()
    (out / name).write_bytes(content[:-10])
    with pytest.raises(CorruptCheckpoint, match=name):
        verify(out)
    (out / name).unlink()
    with pytest.raises(CorruptCheckpoint, match=name):
        verify(out)


def test_unknown_format_is_refused(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    out = tmp_path / "step-000010"
    write_hf_folder(make_weights(10), template, out, dataclasses.replace(SAVE, format_version=9))
    with pytest.raises(CorruptCheckpoint, match="has format 9, this version reads 1"):
        verify(out)


# Saves step 1, then step 2 over an existing step 2, in forks of which each is killed at its n-th
# file operation; prints how many operations there are.
KILL_AT_EVERY_OPERATION = """
import os, signal, sys
from pathlib import Path
from offbeat.checkpoint import writer
from offbeat.checkpoint.manifest import SaveManifest
from offbeat.types import WeightUpdate
root, template, uri, nbytes, digest = sys.argv[1:]
update = WeightUpdate(version=1, uri=uri, nbytes=int(nbytes), digest=digest)

def save(directory, step):
    out = directory / f"step-{step:06d}"
    writer.write_hf_folder(update, Path(template), out, SaveManifest(step=step, version=1))
    writer.point_latest(out)
    writer.prune(directory, 1)

WATCHED = {"open", "os.rename", "os.mkdir", "os.symlink", "os.remove", "os.rmdir"}

def fork_and_kill(directory, n):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left = n
    def hook(event, args):
        nonlocal left
        if event in WATCHED:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save(directory, 2)
    os._exit(0)

n, code = 0, -9
while code == -9:
    for replace in (False, True):
        directory = Path(root) / f"{n:03d}-{replace}"
        save(directory, 1)
        if replace:
            writer.write_hf_folder(update, Path(template), directory / "step-000002",
                                   SaveManifest(step=2, version=1))
        code = fork_and_kill(directory, n)
    n += 1
assert code == 0, code
print(n)
"""


@pytest.mark.invariant("I11")
def test_kill_at_any_file_operation_leaves_only_folders_that_verify(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    update = make_weights(1)
    root = tmp_path / "kills"
    arguments = [root, template, update.uri, update.nbytes, update.digest]
    ran = subprocess.run(
        [sys.executable, "-c", KILL_AT_EVERY_OPERATION, *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(ran.stdout) > 20
    for directory in sorted(root.iterdir()):
        assert step_folders(directory)
        assert all(is_good(folder) for folder in step_folders(directory)), directory.name
        newest = latest(directory)
        assert newest is not None
        assert is_good(newest)
        sweep(directory)
        assert all(is_good(folder) for folder in step_folders(directory)), directory.name
        assert not [path for path in directory.iterdir() if path.name.startswith(".")]
        if directory.name.endswith("True"):
            assert is_good(step_folder(directory, 2)), "the replaced folder got lost"
    shutil.rmtree(root)


def test_writer_process_loads_nothing_heavy() -> None:
    code = (
        "import sys, offbeat.checkpoint.writer, offbeat.checkpoint.saver\n"
        "print([m for m in ('torch', 'transformers', 'aiohttp') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"

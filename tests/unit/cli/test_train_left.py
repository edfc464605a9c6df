"""What an interrupted run says it leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.cli.train import _print_left


def test_without_a_save_the_keys_that_save_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _print_left(tmp_path)
    said = capsys.readouterr().err
    assert "no checkpoint was saved (saver.freq_steps, saver.freq_secs" in said
    assert "--resume would start over (recover.freq_steps, recover.freq_secs" in said
    assert f"offbeat show {tmp_path}" in said


def test_the_newest_checkpoint_and_snapshot_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("checkpoints/step-000010", "checkpoints/step-000020", "snapshots/step-000015"):
        (tmp_path / name).mkdir(parents=True)
    _print_left(tmp_path)
    said = capsys.readouterr().err
    assert f"newest checkpoint {tmp_path / 'checkpoints/step-000020'}" in said
    assert f"--resume continues from {tmp_path / 'snapshots/step-000015'}" in said

"""When snapshots are taken, and what contradicts itself there."""

from __future__ import annotations

import pytest

from offbeat.config import OnError, RecoverConfig, RecoverMode
from offbeat.errors import ConfigError


def test_snapshots_are_taken_every_ten_minutes_unless_told_otherwise() -> None:
    c = RecoverConfig()
    assert (c.mode, c.freq_steps, c.freq_secs, c.keep) == (RecoverMode.OFF, None, 600, 2)


@pytest.mark.parametrize("off", [0, None])
def test_zero_and_null_switch_them_off(off: int | None) -> None:
    assert RecoverConfig(freq_secs=off).freq_secs is None


def test_bare_off_of_yaml_is_the_mode_off() -> None:
    assert RecoverConfig(mode=False).mode is RecoverMode.OFF  # type: ignore[arg-type]  # as YAML reads it


def test_number_to_keep_without_a_snapshot_is_an_error() -> None:
    with pytest.raises(ConfigError, match="keep: 3 has no effect: no snapshot is ever taken"):
        RecoverConfig(freq_secs=0, keep=3)


def test_a_failed_snapshot_ends_the_run_unless_told_otherwise() -> None:
    assert RecoverConfig().on_error is OnError.STOP
    assert RecoverConfig(on_error="continue").on_error is OnError.CONTINUE  # type: ignore[arg-type]  # as YAML reads it


def test_policy_for_failures_without_a_snapshot_is_an_error() -> None:
    with pytest.raises(ConfigError, match="on_error: continue has no effect: no snapshot is ever"):
        RecoverConfig(freq_secs=0, on_error=OnError.CONTINUE)


def test_unknown_mode_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"mode: .*off.*auto"):
        RecoverConfig(mode="resume")  # type: ignore[arg-type]  # a user's mistake

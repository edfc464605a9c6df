"""Which folders stay, what a failed save does, and what contradicts itself there."""

from __future__ import annotations

import pytest

from offbeat.config import OnError, SaverConfig
from offbeat.errors import ConfigError


def test_a_failed_save_ends_the_run_and_every_folder_stays_unless_told_otherwise() -> None:
    c = SaverConfig()
    assert (c.on_error, c.keep_last, c.keep_every) == (OnError.STOP, None, None)


def test_multiples_are_kept_beside_the_newest() -> None:
    c = SaverConfig(freq_steps=10, keep_last=2, keep_every=100)
    assert (c.keep_last, c.keep_every) == (2, 100)


def test_keeping_multiples_where_all_stay_is_an_error() -> None:
    with pytest.raises(ConfigError, match="keep_every: 100 has no effect: keep_last is null"):
        SaverConfig(keep_every=100)


def test_keeping_every_step_leaves_the_number_of_the_newest_without_effect() -> None:
    with pytest.raises(ConfigError, match="keep_last 3 has no effect; set keep_every to 2 or more"):
        SaverConfig(keep_last=3, keep_every=1)


def test_going_on_after_a_failure_needs_a_save_that_is_not_the_last() -> None:
    with pytest.raises(ConfigError, match="on_error: continue has no effect: nothing is saved"):
        SaverConfig(on_error=OnError.CONTINUE)
    assert SaverConfig(on_error=OnError.CONTINUE, freq_secs=60).on_error is OnError.CONTINUE


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"on_error: .*stop, continue"):
        SaverConfig(on_error="ignore", freq_steps=1)  # type: ignore[arg-type]  # a user's mistake

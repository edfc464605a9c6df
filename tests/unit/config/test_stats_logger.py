"""Which trackers a configuration switches on."""

from __future__ import annotations

import pytest

from offbeat.config.stats_logger import StatsLoggerConfig

EVERY = {"tensorboard": {}, "wandb": {}, "mlflow": {}, "trackio": {}}


def test_without_a_section_no_tracker_is_used() -> None:
    assert StatsLoggerConfig().trackers == ()


def test_an_empty_section_switches_its_tracker_on() -> None:
    assert sorted(StatsLoggerConfig(**EVERY).trackers) == sorted(EVERY)


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("tensorboard", {"enabled": False}),
        ("wandb", {"mode": "disabled", "project": "kept"}),
        ("mlflow", {"enabled": False, "tracking_uri": "http://kept"}),
        ("trackio", {"enabled": False}),
    ],
)
def test_a_tracker_is_switched_off_by_its_own_word(name: str, off: dict[str, object]) -> None:
    assert name not in StatsLoggerConfig(**{**EVERY, name: off}).trackers
    assert StatsLoggerConfig(**{name: off}).trackers == ()

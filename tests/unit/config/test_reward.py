"""``rollout.reward_fn``: a name, a URL, or a list of both with weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.config import RewardConfig, from_mapping, load, to_yaml
from offbeat.errors import ConfigError

BASE = {"model": {"path": "m"}, "train_dataset": {"path": "d.jsonl"}}


def rewards(reward_fn: object) -> object:
    return from_mapping({**BASE, "rollout": {"reward_fn": reward_fn}}).rollout.reward_fn


def test_a_list_becomes_sections_with_names_and_weights() -> None:
    assert rewards(
        [
            {"fn": "a.b:match"},
            {"fn": "http://host:8000/v1/judge?x=1", "weight": 2, "args": {"batch": True}},
            {"fn": "https://host.example/", "name": "other", "weight": 0},
        ]
    ) == (
        RewardConfig(fn="a.b:match", name="match", weight=1.0),
        RewardConfig(
            fn="http://host:8000/v1/judge?x=1", name="judge", weight=2.0, args={"batch": True}
        ),
        RewardConfig(fn="https://host.example/", name="other", weight=0.0),
    )


@pytest.mark.parametrize("spec", ["a:b", "http://127.0.0.1:8000/score", "https://host"])
def test_one_function_is_a_name_or_a_url(spec: str) -> None:
    assert rewards(spec) == spec


def test_a_list_survives_yaml_and_an_override(tmp_path: Path) -> None:
    cfg = from_mapping({**BASE, "rollout": {"reward_fn": [{"fn": "a:b", "args": {"x": [1]}}]}})
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(cfg))
    assert load(file) == cfg
    assert load(file, ["rollout.reward_fn=c:d"]).rollout.reward_fn == "c:d"
    listed = load(file, ['rollout.reward_fn=[{fn: "c:d", weight: 2}]']).rollout.reward_fn
    assert listed == (RewardConfig(fn="c:d", weight=2.0),)


@pytest.mark.parametrize(
    ("reward_fn", "line"),
    [
        ("nothing", "rollout.reward_fn: 'nothing' (str) is not a string of the form"),
        ("http://", "rollout.reward_fn: 'http://' is not a URL"),
        ("http://host:99999/", "rollout.reward_fn: 'http://host:99999/' is not a URL"),
        ("http://host:0/", "port 0"),
        ("ftp://host/x", "or a URL (http://host:port/path)"),
        ([], "rollout.reward_fn: an empty list"),
        (["a:b"], "rollout.reward_fn[0]: 'a:b' (str) is not a mapping"),
        ([{}], "rollout.reward_fn[0].fn: required, and not set"),
        ([{"fn": "a:b"}, {"fn": "ab"}], "rollout.reward_fn[1].fn: 'ab' (str) is not a string"),
        ([{"fn": "http://h:x/"}], "rollout.reward_fn[0].fn: 'http://h:x/' is not a URL"),
        ([{"fn": "a:b", "wieght": 1}], "rollout.reward_fn[0].wieght: unknown key; did you mean"),
        ([{"fn": "a:b", "weight": "x"}], "rollout.reward_fn[0].weight: 'x' (str) is not a number"),
        ([{"fn": "a:b", "name": "a b"}], "rollout.reward_fn[0].name: 'a b'"),
        ([{"fn": "a:b", "args": [1]}], "rollout.reward_fn[0].args: [1] (list) is not a mapping"),
        ([{"fn": "a:b"}, {"fn": "c:b"}], "rollout.reward_fn[1].name: 'b' is also the name"),
        (3, "rollout.reward_fn: 3 (int) is not a string of the form"),
    ],
)
def test_a_bad_entry_is_named_by_its_dotted_key(reward_fn: object, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rewards(reward_fn)
    assert line in str(caught.value)

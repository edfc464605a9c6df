"""What ``import offbeat`` promises; everything else may change."""

from __future__ import annotations

import ast
import importlib.metadata
from importlib.resources import files

import pytest

import offbeat

NAMES = [
    "AsyncRewardWrapper",
    "AsyncTaskRunner",
    "Completion",
    "ConfigError",
    "Invalid",
    "OffbeatError",
    "PPOActorConfig",
    "PPOTrainer",
    "Prompt",
    "RLVRWorkflow",
    "Rollout",
    "RunConfig",
    "SamplingParams",
    "Scored",
    "Summary",
    "Turn",
    "Workflow",
    "__version__",
    "load",
]

ALIASES = {"PPOActorConfig": "ActorConfig"}
"""Public names that a reader of other systems expects, and what they are called inside."""


def test_the_public_names_are_these_and_sorted() -> None:
    assert offbeat.__all__ == NAMES
    assert len(NAMES) <= 25
    assert dir(offbeat) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(offbeat, name)
    if name != "__version__":
        assert value.__name__ == ALIASES.get(name, name)
        assert value.__doc__


def test_a_star_import_brings_exactly_the_public_names() -> None:
    space: dict[str, object] = {}
    exec("from offbeat import *", space)
    assert sorted(set(space) - {"__builtins__"}) == NAMES


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'offbeat' has no attribute 'PPOTrainr'"):
        _ = offbeat.PPOTrainr
    assert not hasattr(offbeat, "__wrapped__")


def test_the_package_is_typed_and_says_its_version_once() -> None:
    assert files("offbeat").joinpath("py.typed").is_file()
    assert importlib.metadata.version("offbeat") == offbeat.__version__


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse(files("offbeat").joinpath("__init__.py").read_text())
    guarded = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in ast.walk(node)
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    ]
    assert sorted([*guarded, "__version__"]) == NAMES

"""Plain values become frozen sections, or every problem is named with its path."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, replace
from enum import StrEnum

import pytest

from offbeat.config.schema import (
    FieldErrors,
    PositiveInt,
    Section,
    build,
    filled,
    paths,
    plain,
    preset,
)
from offbeat.errors import ConfigError


class Color(StrEnum):
    RED = "red"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf(Section):
    size: PositiveInt = 1
    color: Color = field(default_factory=preset(Color.RED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree(Section):
    name: str
    leaf: Leaf = field(default_factory=Leaf)
    leaves: tuple[Leaf, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)
    weight: float | None = None
    flag: bool = False


def problems(mapping: Mapping[str, object]) -> dict[str, str]:
    with pytest.raises(FieldErrors) as caught:
        build(Tree, mapping)
    return {problem.path: problem.text for problem in caught.value.problems}


def test_plain_values_become_their_declared_types():
    tree = build(
        Tree,
        {"name": "n", "leaves": [{"size": 2}, {"color": "off"}], "numbers": {"a": 1}, "weight": 2},
    )
    assert tree.leaves == (Leaf(size=2), Leaf(color=Color.OFF))
    assert isinstance(tree.numbers["a"], float)
    assert isinstance(tree.weight, float)


def test_unquoted_on_and_off_select_the_members_of_that_name():
    assert build(Leaf, {"color": False}).color is Color.OFF
    assert build(Leaf, {"color": True}).color is Color.ON


def test_unknown_key_inside_a_list_is_named_with_its_index():
    found = problems({"name": "n", "leaves": [{}, {"sizze": 2}]})
    assert found == {"leaves[1].sizze": "unknown key; did you mean 'size'?"}


def test_bad_value_inside_a_list_is_named_with_its_index():
    found = problems({"name": "n", "leaves": [{"size": 0}, 3]})
    assert found["leaves[0].size"] == "0 (int) is not an integer >= 1"
    assert found["leaves[1]"] == "3 (int) is not a mapping"


def test_all_problems_are_reported_at_once():
    found = problems({"leaf": {"size": True}, "numbers": {"a": "b"}, "flag": 1, "zzz": 0})
    assert set(found) == {"zzz", "name", "leaf.size", "numbers.a", "flag"}
    assert found["flag"] == "1 (int) is not true or false"
    assert "name, leaf, leaves" in found["zzz"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1.0", [1.0]])
def test_what_is_not_a_finite_number_is_refused_as_a_float(value):
    assert "is not a number or null" in problems({"name": "n", "weight": value})["weight"]


def test_object_of_another_kind_is_refused_as_plain_data():
    assert "plain data" in problems({"name": "n", "extra": {"a": {1, 2}}})["extra.a"]


def test_string_is_not_a_list():
    assert "is not a list" in problems({"name": "n", "leaves": "ab"})["leaves"]


def test_presets_leave_given_fields_alone_even_at_their_default():
    assert filled(Leaf(color=Color.RED), {"color": Color.OFF}).color is Color.RED
    assert filled(Leaf(), {"color": Color.OFF}).color is Color.OFF


def test_filling_a_nested_section_keeps_what_was_given_in_it():
    tree = Tree(name="n", leaf=Leaf(color=Color.RED))
    assert filled(tree, {"leaf": {"color": Color.OFF}}).leaf.color is Color.RED
    assert filled(Tree(name="n"), {"leaf": {"color": Color.OFF}}).leaf.color is Color.OFF


def test_filled_value_does_not_count_as_given():
    assert filled(Leaf(), {"color": Color.OFF}).given == frozenset()


def test_null_for_a_preset_field_means_not_given():
    assert build(Leaf, {"color": None}) == Leaf()
    assert "color" not in build(Leaf, {"color": None}).given


def test_sections_are_frozen_and_survive_pickle_and_replace():
    leaf = Leaf(size=3)
    with pytest.raises(FrozenInstanceError):
        leaf.size = 4
    copy = pickle.loads(pickle.dumps(leaf))
    assert copy == leaf
    assert copy.given == leaf.given
    assert replace(leaf, size=5).size == 5


def test_replace_checks_the_new_value():
    with pytest.raises(ConfigError, match=r"size: 0 \(int\) is not an integer >= 1"):
        replace(Leaf(), size=0)


def test_errors_survive_pickle():
    with pytest.raises(FieldErrors) as caught:
        Leaf(size=0)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.problems == caught.value.problems


def test_plain_undoes_build():
    tree = Tree(name="n", leaves=(Leaf(size=2),), extra={"a": (1, {"b": None})})
    assert build(Tree, plain(tree)) == tree


def test_paths_lists_nested_keys():
    assert list(paths(Tree))[:4] == ["name", "leaf", "leaf.size", "leaf.color"]

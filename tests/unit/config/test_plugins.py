"""``module:attr``: found beside the configuration first, or an error that says what is there."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbeat.config.plugins import resolve
from offbeat.errors import ConfigError

KEY = "rollout.reward_fn"

_numbers = itertools.count()

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Writes a module of a new name into ``tmp_path``; the interpreter forgets all afterwards."""
    modules, path = set(sys.modules), list(sys.path)

    def make(text: str) -> str:
        name = f"plugin_of_a_test_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield make
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_module_beside_the_configuration_is_found(write: Write, tmp_path: Path) -> None:
    name = write("def score():\n    return 3\n")
    found = resolve(f"{name}:score", tmp_path, KEY)
    assert callable(found)
    assert found() == 3
    assert sys.path[0] == str(tmp_path)
    resolve(f"{name}:score", tmp_path, KEY)
    assert sys.path.count(str(tmp_path)) == 1


def test_dotted_modules_and_attributes_are_followed(write: Write, tmp_path: Path) -> None:
    package = tmp_path / write("")
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text("class Scores:\n    best = 7\n")
    (tmp_path / f"{package.name}.py").unlink()
    assert resolve(f"{package.name}.inner:Scores.best", tmp_path, KEY) == 7


def test_an_installed_module_is_found_without_a_folder() -> None:
    assert resolve("os.path:join", None, KEY) is __import__("os").path.join


@pytest.mark.parametrize("spec", ["", ":", "module", "module:", ":attr", "a.b.c"])
def test_what_is_not_module_and_attribute_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r'rollout\.reward_fn: .* is not of the form "module:at'):
        resolve(spec, None, KEY)


def test_a_missing_module_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("no_such_module_here:f", tmp_path, KEY)
    assert str(caught.value) == (
        f"{KEY}: module 'no_such_module_here' of 'no_such_module_here:f' was found neither beside "
        f"the configuration file ({tmp_path}) nor as an installed module"
    )
    with pytest.raises(ConfigError, match=r"was found not as an installed module$"):
        resolve("no_such_module_here:f", None, KEY)


def test_a_missing_module_inside_the_module_is_told_apart(write: Write, tmp_path: Path) -> None:
    name = write("import no_such_module_here\n")
    with pytest.raises(ConfigError, match=f"importing '{name}' failed: .*No module named 'no_such"):
        resolve(f"{name}:f", tmp_path, KEY)


def test_a_missing_submodule_is_not_blamed_on_its_package(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"module 'json\.absent' of 'json\.absent:f' was found n"):
        resolve("json.absent:f", tmp_path, KEY)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("def f(:\n", "SyntaxError"),
        ("raise ValueError('not today')\n", "ValueError: not today"),
    ],
)
def test_a_module_that_fails_to_import_shows_its_own_error(
    write: Write, tmp_path: Path, text: str, said: str
) -> None:
    name = write(text)
    with pytest.raises(ConfigError, match=f"{KEY}: importing '{name}' failed: {said}"):
        resolve(f"{name}:f", tmp_path, KEY)


def test_a_script_that_exits_when_imported_does_not_end_the_run_as_a_success(
    write: Write, tmp_path: Path
) -> None:
    name = write("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"called sys\.exit\(0\); .*__main__"):
        resolve(f"{name}:f", tmp_path, KEY)


def test_a_missing_attribute_lists_the_public_ones(write: Write, tmp_path: Path) -> None:
    name = write("_hidden = 1\nscore = 2\nother = 3\n")
    with pytest.raises(ConfigError, match=f"'{name}' has no 'scores'; it has score, other$"):
        resolve(f"{name}:scores", tmp_path, KEY)
    with pytest.raises(ConfigError, match=r"has no 'score\.deeper'$"):
        resolve(f"{name}:score.deeper", tmp_path, KEY)


def test_a_file_hidden_by_a_module_imported_before_is_an_error(
    write: Write, tmp_path: Path
) -> None:
    name = write("score = 1\n")
    assert resolve(f"{name}:score", tmp_path, KEY) == 1
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{name}.py").write_text("score = 2\n")
    with pytest.raises(ConfigError, match=r"hidden by the module .* imported before; rename one"):
        resolve(f"{name}:score", other, KEY)


def test_a_file_named_like_a_built_in_module_is_an_error(write: Write, tmp_path: Path) -> None:
    write("")
    (tmp_path / "time.py").write_text("def time():\n    return 0\n")
    with pytest.raises(ConfigError, match=r"time\.py is hidden by the module 'time' of the interp"):
        resolve("time:time", tmp_path, KEY)


def test_a_mistake_in_a_module_is_placed_in_the_users_own_file(
    write: Write, tmp_path: Path
) -> None:
    inner = write("import json\n\njson.loads('{')\n")
    outer = write(f"import {inner}\n")
    where = rf"JSONDecodeError: .* \({tmp_path}/{inner}\.py:3\)$"
    with pytest.raises(ConfigError, match=where):
        resolve(f"{outer}:score", tmp_path, KEY)


def test_a_missing_module_is_compared_with_the_files_beside_the_configuration(
    write: Write, tmp_path: Path
) -> None:
    name = write("")
    with pytest.raises(ConfigError, match=rf"installed module; did you mean '{name}'\?$"):
        resolve(f"{name[:-2]}_x{name[-2:]}:score", tmp_path, KEY)

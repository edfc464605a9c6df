"""What a word after ``offbeat eval`` means: a configuration, a run, a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.checkpoint.folders import point_latest, replacing, step_folder
from offbeat.checkpoint.manifest import SaveManifest, seal
from offbeat.errors import ConfigError, CorruptCheckpoint, DataError, ModelError
from offbeat.pipeline.evaluation_target import find_target
from offbeat.types import PolicyVersion


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs of which one has checkpoints of steps 2 and 10."""
    run = tmp_path / "runs" / "sums" / "one"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{}\n")
    for step in (2, 10):
        folder = step_folder(run / "checkpoints", step)
        with replacing(folder) as aside:
            (aside / "config.json").write_text("{}")
            seal(aside, SaveManifest(step=step, version=PolicyVersion(step)), {})
        point_latest(folder)
    return tmp_path / "runs"


def checkpoint(runs: Path, step: int) -> Path:
    return runs / "sums" / "one" / "checkpoints" / f"step-{step:06d}"


@pytest.mark.parametrize("name", ["latest", "sums", "sums/one", "one", "{runs}/sums/one"])
def test_a_run_is_its_configuration_and_its_newest_checkpoint(runs: Path, name: str) -> None:
    found = find_target(name.format(runs=runs), fileroot=runs)
    assert found.config == runs / "sums" / "one" / "config.yaml"
    assert found.model == checkpoint(runs, 10)


def test_a_step_names_another_checkpoint_of_the_run(runs: Path) -> None:
    assert find_target("latest", fileroot=runs, step=2).model == checkpoint(runs, 2)
    with pytest.raises(ModelError, match=r"no checkpoint of step 3 \(saved are steps 10, 2\)"):
        find_target("latest", fileroot=runs, step=3)


def test_a_run_without_a_checkpoint_says_so_and_takes_another_model(
    runs: Path, tmp_path: Path
) -> None:
    bare = runs / "sums" / "two"
    bare.mkdir()
    (bare / "config.yaml").write_text("{}\n")
    with pytest.raises(ModelError, match=r"no checkpoint \(none was saved\);.* --checkpoint"):
        find_target(str(bare), fileroot=runs)
    assert find_target(str(bare), fileroot=runs, checkpoint=tmp_path).model == tmp_path


def test_a_checkpoint_that_was_altered_is_refused(runs: Path) -> None:
    (checkpoint(runs, 10) / "config.json").write_text('{"a": 1}')
    with pytest.raises(CorruptCheckpoint, match=r"config\.json has 8 bytes"):
        find_target("latest", fileroot=runs)


def test_a_folder_with_a_config_json_is_a_model(runs: Path) -> None:
    found = find_target(str(checkpoint(runs, 2)), fileroot=runs)
    assert (found.config, found.model) == (None, checkpoint(runs, 2))


def test_a_file_is_a_configuration_and_so_is_a_missing_one_that_ends_like_it(
    runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "settings").write_text("{}\n")
    assert find_target(str(tmp_path / "settings"), fileroot=runs).config == tmp_path / "settings"
    assert find_target("absent.yaml", fileroot=runs).config == Path("absent.yaml")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step": 3}, "--step 3: absent.yaml is a configuration; only a run has steps"),
        ({"step": 3, "name": "{model}"}, "is a model; only a run has steps"),
        ({"checkpoint": Path("m"), "name": "{model}"}, "is a model already; name one of them"),
        ({"step": 2, "checkpoint": Path("m"), "name": "latest"}, "name two models; keep one"),
    ],
)
def test_an_option_without_effect_is_refused(
    runs: Path, options: dict[str, object], said: str
) -> None:
    given = {"name": "absent.yaml", **options}
    name = str(given.pop("name")).format(model=checkpoint(runs, 2))
    with pytest.raises(ConfigError, match=said):
        find_target(name, fileroot=runs, **given)  # type: ignore[arg-type]  # a test's keywords


@pytest.mark.parametrize("name", ["absent", "a/b/c"])
def test_a_word_that_is_nothing_names_all_that_it_could_have_been(runs: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"there is no folder.*A configuration file, or a model"):
        find_target(name, fileroot=runs)

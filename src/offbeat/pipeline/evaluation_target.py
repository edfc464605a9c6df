"""What ``offbeat eval`` is pointed at: a configuration file, a run, or a model.

Consumes the word that a person wrote; produces the files that it means. Reads no configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offbeat.checkpoint.folders import CHECKPOINTS, latest, step_folder, step_folders
from offbeat.checkpoint.manifest import verify
from offbeat.errors import ConfigError, DataError, ModelError
from offbeat.model.hub import fetch_model, is_hub_name
from offbeat.observe.find import CONFIG_FILE, find_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``config``: the YAML file; None for a model by itself. ``model``: the folder that is
    evaluated; None: the one that the configuration names.
    """

    config: Path | None
    model: Path | None


def find_target(
    name: str, *, fileroot: Path, step: int | None = None, checkpoint: Path | None = None
) -> Target:
    """What ``name`` means, in this order: a file, a model folder, a run, a model of the hub.

    Args:
        name: as written.
        fileroot: where runs are kept.
        step: a run's checkpoint; None is the newest one.
        checkpoint: model folder in place of the one that a configuration or a run names.

    Raises:
        ConfigError: ``step`` or ``checkpoint`` has no effect here.
        ModelError: the run has no such checkpoint, or the hub's model cannot be fetched.
        CorruptCheckpoint: the checkpoint is not what was saved.
        DataError: nothing of that name.
    """
    path = Path(name).expanduser()
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        _refuse_step(step, f"{name} is a configuration")
        return Target(config=path, model=checkpoint)
    if (path / "config.json").is_file():
        return _bare_model(name, path, step, checkpoint)
    if name == "latest" or path.is_dir() or (fileroot / name).is_dir() or not is_hub_name(name):
        return _run(name, fileroot, step, checkpoint)
    return _bare_model(name, fetch_model(name), step, checkpoint)


def _refuse_step(step: int | None, what: str) -> None:
    if step is not None:
        raise ConfigError(f"--step {step}: {what}; only a run has steps")


def _bare_model(name: str, folder: Path, step: int | None, checkpoint: Path | None) -> Target:
    _refuse_step(step, f"{name} is a model")
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint {checkpoint}: {name} is a model already; name one of them")
    return Target(config=None, model=folder)


def _run(name: str, fileroot: Path, step: int | None, checkpoint: Path | None) -> Target:
    try:
        run = find_run(name, fileroot)
    except DataError as exc:
        raise DataError(
            f"{exc}. A configuration file, or a model folder with a config.json, would do too"
        ) from exc
    if checkpoint is None:
        checkpoint = run_checkpoint(run, step)
    elif step is not None:
        raise ConfigError(f"--step {step} and --checkpoint {checkpoint} name two models; keep one")
    return Target(config=run / CONFIG_FILE, model=checkpoint)


def run_checkpoint(run: Path, step: int | None = None) -> Path:
    """The model folder that ``run`` saved in ``step``, or its newest one, verified.

    Raises:
        ModelError: it saved none.
        CorruptCheckpoint: the folder is not what was saved.
    """
    saved = run / CHECKPOINTS
    folder = latest(saved) if step is None else step_folder(saved, step)
    if folder is None or not folder.is_dir():
        steps = ", ".join(f.name.removeprefix("step-").lstrip("0") for f in step_folders(saved))
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise ModelError(
            f"{run} has {wanted} ({f'saved are steps {steps}' if steps else 'none was saved'}); "
            "name another run, or a model folder (in eval: --checkpoint FOLDER)"
        )
    verify(folder)
    return folder

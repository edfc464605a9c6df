"""The configuration that a run recorded, as keys and values, whatever version of offbeat wrote it.

Reads ``config.yaml`` as data: keys that this version does not know are no error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from offbeat.config import source
from offbeat.errors import DataError
from offbeat.observe.find import CONFIG_FILE


def recorded_config(run_dir: Path) -> Mapping[str, object]:
    """Dotted key to value.

    Raises:
        ConfigError: the file cannot be read.
        DataError: there is none.
    """
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        raise DataError(f"{file}: there is no such file; the run has not recorded a configuration")
    return dict(_flat(source.read(file, ()).mapping, ""))


def differences(
    configs: Sequence[Mapping[str, object]],
) -> Mapping[str, tuple[object, ...]]:
    """Keys whose values differ, with the value of each configuration; None where it has no such
    key.
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    values = {key: tuple(config.get(key) for config in configs) for key in keys}
    return {key: found for key, found in values.items() if any(v != found[0] for v in found)}


def _flat(value: object, key: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _flat(below, f"{key}.{name}" if key else str(name))
    else:
        yield key, value

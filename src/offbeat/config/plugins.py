"""Resolve ``"module:attr"`` strings: the one way user code enters offbeat.

The module is looked up first beside the configuration file, then as an installed module.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from offbeat.errors import ConfigError


def resolve(spec: str, search_dir: Path | None, key: str) -> object:
    """The object that ``spec`` names.

    Args:
        spec: ``"module:attr"``; both may be dotted.
        search_dir: folder looked up before the installed modules; prepended to ``sys.path``.
        key: configuration path of ``spec``, for the error message.

    Raises:
        ConfigError: malformed spec, module not found or failing to import, attribute missing.
    """
    module_name, sep, attr_path = spec.partition(":")
    if not sep or not module_name or not attr_path:
        raise ConfigError(f'{key}: {spec!r} is not of the form "module:attr"')
    if search_dir is not None and str(search_dir) not in sys.path:
        sys.path.insert(0, str(search_dir))
        importlib.invalidate_caches()
    try:
        target: object = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and not f"{module_name}.".startswith(f"{exc.name}."):
            raise ConfigError(f"{key}: importing {module_name!r} failed: {exc}") from exc
        where = f"beside the configuration file ({search_dir}) nor" if search_dir else ""
        raise ConfigError(
            f"{key}: module {module_name!r} of {spec!r} was found neither {where} as an installed module"
        ) from exc
    except Exception as exc:
        raise ConfigError(
            f"{key}: importing {module_name!r} failed: {type(exc).__name__}: {exc}"
        ) from exc
    for name in attr_path.split("."):
        if not hasattr(target, name):
            public = [n for n in vars(target) if not n.startswith("_")] if hasattr(target, "__dict__") else []
            raise ConfigError(f"{key}: {module_name!r} has no {attr_path!r}; it has {', '.join(public[:20])}")
        target = getattr(target, name)
    return target

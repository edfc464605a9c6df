"""Resolve ``"module:attr"`` strings: the one way user code enters offbeat.

The module is looked up first beside the configuration file, then as an installed module.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

from offbeat.errors import ConfigError, boundary


def resolve(spec: str, search_dir: Path | None, key: str) -> object:
    """The object that ``spec`` names.

    Args:
        spec: ``"module:attr"``; both may be dotted.
        search_dir: folder looked up before the installed modules; prepended to ``sys.path``.
        key: configuration path of ``spec``, for the error message.

    Raises:
        ConfigError: malformed spec, module not found, failing to import or hidden by another of
            the same name, attribute missing.
    """
    module_name, sep, attr_path = spec.partition(":")
    if not sep or not module_name or not attr_path:
        raise ConfigError(f'{key}: {spec!r} is not of the form "module:attr"')
    if search_dir is not None and str(search_dir) not in sys.path:
        sys.path.insert(0, str(search_dir))
        importlib.invalidate_caches()
    try:
        with boundary(ConfigError, f"{key}: importing {module_name!r} failed"):
            module = _import(module_name, spec, search_dir, key)
    except ConfigError as exc:
        raise ConfigError(f"{exc}{_place(exc.__cause__, search_dir)}") from exc.__cause__
    if search_dir is not None:
        _check_not_hidden(module, search_dir, key)
    target: object = module
    for name in attr_path.split("."):
        if not hasattr(target, name):
            public = [n for n in getattr(target, "__dict__", {}) if not n.startswith("_")]
            has = f"; it has {', '.join(public[:20])}" if public else ""
            raise ConfigError(f"{key}: {module_name!r} has no {attr_path!r}{has}")
        target = getattr(target, name)
    return target


def _import(module_name: str, spec: str, search_dir: Path | None, key: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{module_name}.".startswith(f"{exc.name}."):
            raise  # it was found; something that it imports was not
        where = f"neither beside the configuration file ({search_dir}) nor" if search_dir else "not"
        raise ConfigError(
            f"{key}: module {module_name!r} of {spec!r} was found {where} as an installed module"
            f"{_nearest(module_name, search_dir)}"
        ) from exc
    except SystemExit as exc:
        # Passed on, it would end the run as if all had gone well.
        raise ConfigError(
            f"{key}: importing {module_name!r} called sys.exit({exc.code!r}); put what the file "
            'does as a script under `if __name__ == "__main__":`'
        ) from exc


def _nearest(module_name: str, search_dir: Path | None) -> str:
    names = [file.stem for file in search_dir.glob("*.py")] if search_dir is not None else []
    near = difflib.get_close_matches(module_name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _place(cause: BaseException | None, folder: Path | None) -> str:
    """Line of the user's own file in which ``cause`` was raised; empty where it was in none."""
    if cause is None or folder is None:
        return ""
    own = [
        frame
        for frame in traceback.extract_tb(cause.__traceback__)
        if Path(frame.filename).is_relative_to(folder) and "site-packages" not in frame.filename
    ]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _check_not_hidden(module: ModuleType, search_dir: Path, key: str) -> None:
    """A module imported earlier under the same name would silently be used in the file's place."""
    top = module.__name__.partition(".")[0]
    here = (search_dir / f"{top}.py", search_dir / top / "__init__.py")
    found = getattr(sys.modules[top], "__file__", None)
    wanted = next((file for file in here if file.is_file()), None)
    if wanted is not None and (found is None or Path(found).resolve() != wanted.resolve()):
        raise ConfigError(
            f"{key}: {wanted} is hidden by the module {top!r} of {found or 'the interpreter'}, "
            "which was imported before; rename one of them"
        )

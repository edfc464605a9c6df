"""Packages that only some data sets need: import one, or say which extra installs it."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from offbeat.errors import DataError


def import_extra(package: str, extra: str, what: str) -> ModuleType:
    """The module ``package``.

    Args:
        package: name of the module and of its package, but for ``-`` in place of ``_``.
        extra: offbeat's extra that installs it.
        what: what needs it, with the configuration path, for the error message.

    Raises:
        DataError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        name = package.replace("_", "-")
        raise DataError(
            f"{what} needs the {name} package, which is not installed: pip install {name} "
            f"(offbeat's extra {extra})"
        )
    return importlib.import_module(package)

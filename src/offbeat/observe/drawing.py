"""The figures of matplotlib (extra ``plot``), or the word that it is not installed."""

from __future__ import annotations

from typing import Any

from offbeat.errors import ConfigError


def figure_class(what: str) -> Any:
    """``matplotlib.figure.Figure``.

    Raises:
        ConfigError: matplotlib is not installed; ``what`` needs it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError(
            f"{what} needs the matplotlib package, which is not installed: "
            "pip install matplotlib (offbeat's extra plot)"
        ) from exc
    return Figure

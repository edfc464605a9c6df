"""Text that any terminal can show: harmless, in columns, and plain where there is no UTF-8.

Pure: values in, strings out. Knows no runs and no metrics.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from rich.cells import cell_len

BARS = "▁▂▃▄▅▆▇█"

_THOUSAND = 1000.0

_PLAIN = str.maketrans(
    {
        **dict(zip(BARS, "..:-=+*#", strict=True)),
        **dict.fromkeys("─━╸╺", "-"),
        **dict.fromkeys("│┃", "|"),
        **dict.fromkeys("┌┐└┘├┤┬┴┼", "+"),
    }
)


def harmless(text: str) -> str:
    """``text`` with every character escaped that is not printable, except newlines."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def encodable(text: str, encoding: str) -> str:
    """``text`` as a stream with ``encoding`` can take it.

    Bars and frames become their ASCII likenesses where there is no UTF-8; what is still missing is
    escaped.
    """
    if is_utf8(encoding):
        return text
    return text.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)


def is_utf8(encoding: str) -> bool:
    """Whether a stream with ``encoding`` shows blocks, frames and Braille."""
    return encoding.lower().replace("-", "").startswith("utf")


def number(value: float | None, spec: str = ".3f") -> str:
    """``value`` as ``spec`` says; ``-`` for what was not measured."""
    return "-" if value is None else format(value, spec)


def size(nbytes: int) -> str:
    """``nbytes`` in the largest of B, kB, MB, GB and TB of which there is one."""
    amount, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < _THOUSAND:
            break
        amount, unit = amount / _THOUSAND, larger
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def table(title: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines of aligned columns, two spaces between them, wide characters counted as such.

    Args:
        title: the heads of the columns.
        rows: cells without newlines, as many in each row as there are heads.
        left: how many of the first columns are aligned at their left; the others at their right.
    """
    widths = [max(map(cell_len, column)) for column in zip(title, *rows, strict=True)]

    def cell(text: str, place: int) -> str:
        padding = " " * (widths[place] - cell_len(text))
        return text + padding if place < left else padding + text

    return [
        "  ".join(cell(text, i) for i, text in enumerate(row)).rstrip() for row in [title, *rows]
    ]


def means(values: Sequence[float], count: int) -> list[float]:
    """``values`` (not empty) as at most ``count`` means, each of an equal share of them."""
    n = min(count, len(values))
    edges = [round(i * len(values) / n) for i in range(n + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """``values`` (finite, not empty) as at most ``width`` bars between their minimum and maximum.

    More values than bars: each bar is the mean of an equal share.
    """
    shares = means(values, width)
    low, high = min(shares), max(shares)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((m - low) * scale)] for m in shares)

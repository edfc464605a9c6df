"""Named random streams from one seed: no global generator, no ``hash()``, no clock.

``derive(seed, "rollout", group_id, sibling, turn)`` is the same 64-bit number on every machine and
in every run.
"""

from __future__ import annotations

import xxhash


def derive(seed: int, *names: str | int) -> int:
    """A 64-bit unsigned integer for the stream called ``names`` under ``seed``.

    Names are told apart by value and type: 12 and "12" are two streams. A text must not contain
    the unit separator (U+001F), which stands between names.
    """
    label = "\x1f".join([str(seed), *(f"{type(n).__name__}:{n}" for n in names)])
    return int(xxhash.xxh3_64_intdigest(label.encode("utf-8", "surrogatepass")))

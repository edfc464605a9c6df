r"""GSM8K: grade-school word problems, rewarded for the right final number.

The data set has ``question`` and ``answer`` (a solution that ends with ``#### 18``). The final
number of a text is, in this order: the first number after the last ``####``, the last number in the
last ``\boxed{...}``, the last number of all. Numbers are compared by value: ``$1,000``, ``1000``
and ``1000.00`` are equal.
"""

from __future__ import annotations

import re
from decimal import Decimal

# A minus sign belongs to the number unless what is subtracted from stands right before it, as in
# 16-3.
_NUMBER = re.compile(
    r"(?:(?<![\w)])-\$?|\$-?)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
    r"|(?:(?<![\w)])-\$?|\$-?)?\.\d+"
)


def final_number(text: str) -> Decimal | None:
    """The number that ``text`` gives as its answer; None when there is none."""
    text = text.replace("\N{MINUS SIGN}", "-")
    _, marked, after = text.rpartition("####")
    if marked and (found := _numbers(after)):
        return found[0]
    boxed = _last_boxed(text)
    if boxed is not None and (found := _numbers(boxed)):
        return found[-1]
    found = _numbers(text)
    return found[-1] if found else None


def _numbers(text: str) -> list[Decimal]:
    return [Decimal(re.sub(r"[$,]", "", match)) for match in _NUMBER.findall(text)]


def _last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{...}``, whose braces may be nested."""
    _, found, rest = text.rpartition(r"\boxed{")
    if not found:
        return None
    depth = 1
    for position, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:position]
    return None


def reward(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: str,
    **columns: object,
) -> float:
    """1.0 when the final number of the text is that of the solution, otherwise 0.0.

    Raises ValueError when the solution has no number: that is a fault of the data, not a wrong
        answer.
    """
    wanted = final_number(answer)
    if wanted is None:
        raise ValueError(f"the solution has no number: {answer!r}")
    return float(final_number(completions) == wanted)

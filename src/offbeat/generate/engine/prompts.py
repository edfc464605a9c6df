"""Which slots hold which prompt, and what is still being computed.

Owns both books and the order in which prompts are computed. Knows no keys and no weights: the
engine computes the chunks that ``plan`` names and says when they are done.

What is pending may also be a prompt and what an interrupted request wrote after it, whose keys are
computed anew; here it is a prompt like any other, which nobody asks for later.

A prompt that several requests share is computed once, in the slot of the first of them, the
*owner*; the others wait and copy. Its keys stay good in any slot, of a running request or free,
until that slot is given to another prompt; so later siblings can still copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from offbeat.types import IntArray


@dataclass(slots=True, kw_only=True)
class HeldPrompt:
    """A computed prompt: the slots that hold its keys, and the logits [V] after its last token."""

    slots: list[int]
    logits: Tensor


@dataclass(slots=True, kw_only=True)
class PendingPrompt:
    """A prompt of which ``done`` tokens are computed, in ``slots[0]``; the other slots wait."""

    ids: IntArray
    slots: list[int] = field(default_factory=list)
    done: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens ``begin`` to ``end`` of a prompt, to be computed into ``slot``."""

    key: bytes
    slot: int
    ids: IntArray
    begin: int
    end: int

    @property
    def last(self) -> bool:
        """Whether the prompt is complete with it."""
        return self.end == len(self.ids)


class PromptBook:
    """Every prompt is held, pending or unknown; a slot holds one and waits for one at most.

    It does both while it holds the prompt of an interrupted request and waits for the rest.
    """

    def __init__(self) -> None:
        self._held: dict[bytes, HeldPrompt] = {}
        self._pending: dict[bytes, PendingPrompt] = {}

    def held(self, key: bytes) -> HeldPrompt | None:
        """The computed prompt, as long as some slot has it."""
        return self._held.get(key)

    def vacate(self, slot: int, *, unless: bytes = b"") -> None:
        """``slot`` will hold the prompt ``unless``, or none; what it held before is gone."""
        for key in [k for k, p in self._held.items() if slot in p.slots and k != unless]:
            self._held[key].slots.remove(slot)
            if not self._held[key].slots:
                del self._held[key]

    def wait(self, key: bytes, ids: IntArray, slot: int, *, done: int = 0) -> None:
        """``slot`` needs a prompt that is not held, and has the keys of ``done`` of its tokens."""
        self._pending.setdefault(key, PendingPrompt(ids=ids, done=done)).slots.append(slot)

    def plan(self, budget: int) -> list[Chunk]:
        """What to compute next, in order of arrival, at most ``budget`` tokens."""
        chunks: list[Chunk] = []
        for key, prompt in self._pending.items():
            if budget <= 0:
                break
            end = min(len(prompt.ids), prompt.done + budget)
            budget -= end - prompt.done
            chunks.append(
                Chunk(key=key, slot=prompt.slots[0], ids=prompt.ids, begin=prompt.done, end=end)
            )
        return chunks

    def advance(self, chunk: Chunk) -> None:
        """``chunk``, not the last of its prompt, is computed."""
        self._pending[chunk.key].done = chunk.end

    def complete(self, key: bytes) -> list[int]:
        """The prompt is computed in its owner's slot; returns the slots that waited, owner first.

        The caller copies, and says by ``hold`` who can be copied from later.
        """
        return self._pending.pop(key).slots

    def hold(self, key: bytes, slots: Sequence[int], logits: Tensor) -> None:
        """``slots`` have the keys of a computed prompt; ``logits`` [V] follow its last token."""
        self._held[key] = HeldPrompt(slots=list(slots), logits=logits)

    def leave(self, slot: int) -> PendingPrompt | None:
        """``slot`` does not wait any more; returns the prompt if its keys must move to a new owner.

        The new owner is its ``slots[0]``. Without one who waits, the prompt is dropped.
        """
        key = next((k for k, p in self._pending.items() if slot in p.slots), None)
        if key is None:
            return None
        prompt = self._pending[key]
        owned = prompt.slots[0] == slot
        prompt.slots.remove(slot)
        if not prompt.slots:
            del self._pending[key]
            return None
        return prompt if owned else None

    def clear(self) -> None:
        """No slot has keys that count, and nobody waits."""
        self._held.clear()
        self._pending.clear()

    def renumber(self, number: Sequence[int]) -> None:
        """Slot i is called ``number[i]`` from now on."""
        for slots in (
            *(p.slots for p in self._held.values()),
            *(p.slots for p in self._pending.values()),
        ):
            slots[:] = [number[s] for s in slots]

"""Two turns with a tool: the model calls a calculator, reads what it says, and answers.

    the prompt                  6+3?
    the model writes a call     6+3
    the calculator adds         =9;
    the model writes an answer  9

The model is trained on the tokens that it wrote, in both turns. What the calculator added is in the
row, and the model reads it, but it has no loss: who wrote a token decides that, never its value.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from offbeat import AsyncRewardWrapper, Prompt, Rollout, Turn
from offbeat.protocols import EpisodeEngine

CALL_TOKENS = 3
ANSWER_TOKENS = 1


def rows() -> list[dict[str, str]]:
    """All sums of two digits whose result is one digit."""
    return [
        {"prompt": f"{a}+{b}?", "call": f"{a}+{b}", "answer": str(a + b)}
        for a in range(10)
        for b in range(10 - a)
    ]


def calculate(call: str) -> str:
    """The tool: the value of ``a+b``, or ``E`` for anything that is not that."""
    found = re.fullmatch(r"(\d)\+(\d)", call)
    return str(int(found[1]) + int(found[2])) if found else "E"


def reward(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    call: str,
    answer: str,
    called: str,
    **columns: object,
) -> dict[str, float]:
    """Half for the call, by characters; half for the right answer."""
    right = sum(given == wanted for given, wanted in zip(called, call, strict=False)) / len(call)
    solved = float(completions == answer)
    return {"reward": (right + solved) / 2, "call": right, "answer": solved}


class Calculator:
    """Every sibling in two turns; the reward sees both.

    Args:
        reward_fn: what ``rollout.reward_fn`` names, ready to be awaited.
    """

    def __init__(self, reward_fn: AsyncRewardWrapper) -> None:
        self.reward_fn = reward_fn

    async def arun_episode(self, engine: EpisodeEngine, data: Prompt) -> Sequence[Rollout]:
        """All siblings of one prompt, at the same time."""
        async with asyncio.TaskGroup() as group:
            siblings = [
                group.create_task(self.sibling(engine, data, number))
                for number in range(engine.n_samples)
            ]
        return [sibling.result() for sibling in siblings]

    async def sibling(self, engine: EpisodeEngine, data: Prompt, number: int) -> Rollout:
        """One call, one answer."""
        asked = data.token_ids.tolist()
        calling = replace(engine.params, max_new_tokens=CALL_TOKENS)
        call = await engine.agenerate(asked, sibling=number, params=calling)
        # The model's own ids go on, never its text encoded again: those could be other tokens.
        told = [*asked, *call.token_ids.tolist(), *engine.encode(f"={calculate(call.text)};")]
        answering = replace(engine.params, max_new_tokens=ANSWER_TOKENS)
        answer = await engine.agenerate(told, sibling=number, turn=1, params=answering)
        score = await self.reward_fn(
            data.text,
            answer.text,
            told,
            answer.token_ids.tolist(),
            called=call.text,
            **data.columns,
        )
        turns = (
            Turn(prompt_ids=data.token_ids, completion=call),
            Turn(prompt_ids=np.array(told), completion=answer),
        )
        return Rollout(sibling=number, turns=turns, reward=score)

"""An asynchronous reward that asks a server, and the rows it is asked about.

While one answer is judged, the next ones are sent: an `async def` reward has many calls under way
in one process. A call that takes longer than `rollout.reward_timeout_seconds` is canceled. A server
that is down makes answers invalid, which is not the same as a reward of zero; when too many are,
the run ends and says why.
"""

from __future__ import annotations

import os
from functools import cache

import aiohttp

URL = os.environ.get("REWARD_URL", "http://127.0.0.1:8423/score")


def rows() -> list[dict[str, str]]:
    """Prompts "0<" to "8<": which digit is larger?"""
    return [{"prompt": f"{digit}<"} for digit in range(9)]


@cache
def session() -> aiohttp.ClientSession:
    """One pool of connections for all calls; made in the event loop of the reward process."""
    return aiohttp.ClientSession(raise_for_status=True)


async def reward(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    **columns: object,
) -> float:
    """What the server says of one answer."""
    question = {"prompt": prompt, "answer": completions}
    async with session().post(URL, json=question) as response:
        return float((await response.json())["reward"])

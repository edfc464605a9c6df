"""A reward computed by a web service: ``rollout.reward_fn: http://host:port/path``.

Owns the request, the answer and what is tried again; knows no deadline: the reward pool cancels a
late call. Runs in a reward process, the only one that loads aiohttp for it.

One POST for each answer, with a JSON object: ``prompt``, ``completion``, ``prompt_ids``,
``completion_ids`` and ``columns`` (the row's other columns, an object). The service answers with a
number or with an object ``{"reward": number, ...}`` whose other numbers are parts.

With ``args: {batch: true}`` one POST for each group: ``prompts``, ``completions``, ``prompt_ids``,
``completion_ids`` are lists over its answers and ``columns`` is an object of such lists. The
service answers with a list that has one entry for each; null: no reward for this one.

A refused connection and a status of 500 or above are tried again, ``ATTEMPTS`` times in all. Any
other status than 200 is the service's word on this answer: the reward is invalid, with the status
and the first line of the body as its reason.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import cached_property

import aiohttp

from offbeat.errors import RewardError, boundary

ATTEMPTS = 3
PAUSE_SECONDS = 0.25
"""Before the second attempt; twice as long before each further one."""

MAX_LINE = 200


class _Service:
    """Posts JSON to one address; its connections stay open from call to call.

    Args:
        url: where to post to.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    async def _post(self, body: Mapping[str, object]) -> object:
        with boundary(RewardError, f"{self._url}: the columns are no JSON"):
            data = json.dumps(body, allow_nan=False).encode()
        trouble = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
            try:
                status, text = await self._once(data)
            except aiohttp.ClientError as exc:
                trouble = f"{type(exc).__name__}: {exc}"
                continue
            if status < 500:
                return self._read(status, text)
            trouble = f"status {status}: {_first_line(text)}"
        raise RewardError(f"{self._url}: {ATTEMPTS} attempts failed, the last with {trouble}")

    async def _once(self, data: bytes) -> tuple[int, str]:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(
            self._url, data=data, headers=headers, allow_redirects=False
        ) as response:
            return response.status, await response.text(errors="replace")

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        """Made in the event loop that uses it; the pool bounds the calls at a time, and their time.

        Open until the process is killed.
        """
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )

    def _read(self, status: int, text: str) -> object:
        if status != 200:
            raise RewardError(f"{self._url}: status {status}: {_first_line(text)}")
        try:
            return json.loads(text)
        except ValueError as exc:
            raise RewardError(f"{self._url}: the answer is no JSON: {_first_line(text)}") from exc


class HttpReward(_Service):
    """Scores one answer by one request."""

    async def __call__(
        self,
        prompt: str,
        completion: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        **columns: object,
    ) -> object:
        """What the service answered."""
        return await self._post(
            {
                "prompt": prompt,
                "completion": completion,
                "prompt_ids": prompt_ids,
                "completion_ids": completion_ids,
                "columns": columns,
            }
        )


class HttpGroupReward(_Service):
    """Scores all answers of a group by one request."""

    async def __call__(
        self,
        completions: list[object],
        prompts: list[object],
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        **columns: object,
    ) -> object:
        """What the service answered."""
        columns.pop("completions_ids", None)
        return await self._post(
            {
                "prompts": prompts,
                "completions": completions,
                "prompt_ids": prompt_ids,
                "completion_ids": completion_ids,
                "columns": columns,
            }
        )


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line[:MAX_LINE] or "an empty body"

"""HTTP rewards against a service of this process, called from real reward processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from offbeat.errors import ConfigError
from offbeat.rollout.reward import AsyncRewardWrapper
from offbeat.rollout.reward_source import RewardPart
from offbeat.rollout.signatures import RewardInput
from offbeat.types import Invalid, Reward, Scored

Respond = Callable[[dict[str, object]], web.Response]


@asynccontextmanager
async def service(respond: Respond) -> AsyncIterator[tuple[str, list[dict[str, object]]]]:
    """A server on a free port: its URL, and the requests that came."""
    seen: list[dict[str, object]] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return respond(seen[-1])

    app = web.Application()
    app.router.add_post("/score", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/score", seen
    finally:
        await runner.cleanup()


async def score(url: str, timeout_seconds: float = 10.0) -> Reward:
    async with AsyncRewardWrapper(url, timeout_seconds=timeout_seconds, workers=1) as reward:
        return await reward("2+2=", "4", [7, 8], [52], answer="4")


async def test_one_request_for_each_answer_has_texts_ids_and_columns() -> None:
    respond = lambda body: web.json_response({"reward": 1, "exact": body["completion"] == "4"})  # noqa: E731
    async with service(respond) as (url, seen):
        assert await score(url) == Scored(value=1.0, parts={"exact": 1.0})
    assert seen == [
        {
            "prompt": "2+2=",
            "completion": "4",
            "prompt_ids": [7, 8],
            "completion_ids": [52],
            "columns": {"answer": "4"},
        }
    ]


async def test_a_batch_is_one_request_for_the_group_and_null_is_invalid() -> None:
    async with service(lambda body: web.json_response([0.5, None])) as (url, seen):
        part = RewardPart(source=url, name="judge", args={"batch": True})
        async with AsyncRewardWrapper([part], workers=1) as reward:
            group = await reward.group()
            for sibling, text in enumerate("ab"):
                await group.add(
                    sibling,
                    RewardInput(
                        prompt="p",
                        completion=text,
                        prompt_ids=[7],
                        completion_ids=[sibling],
                        columns={"answer": "a"},
                    ),
                )
            rewards = await group.rewards()
    assert rewards[0] == Scored(value=0.5, parts={"judge": 0.5})
    assert isinstance(rewards[1], Invalid)
    assert seen == [
        {
            "prompts": ["p", "p"],
            "completions": ["a", "b"],
            "prompt_ids": [[7], [7]],
            "completion_ids": [[0], [1]],
            "columns": {"answer": ["a", "a"]},
        }
    ]


async def test_a_refusal_is_invalid_with_status_and_first_line_and_is_not_tried_again() -> None:
    refuse = lambda body: web.Response(status=422, text="no such rubric\ndetails")  # noqa: E731
    async with service(refuse) as (url, seen):
        assert await score(url) == Invalid(reason=f"{url}: status 422: no such rubric")
    assert len(seen) == 1


async def test_an_error_of_the_service_is_tried_again() -> None:
    answers = [web.Response(status=503, text="busy"), web.json_response(0.5)]
    async with service(lambda body: answers.pop(0)) as (url, seen):
        assert await score(url) == Scored(value=0.5)
    assert len(seen) == 2


async def test_a_service_that_stays_broken_is_invalid_after_three_attempts() -> None:
    async with service(lambda body: web.Response(status=500, text="oh no")) as (url, seen):
        reward = await score(url)
    assert reward == Invalid(reason=f"{url}: 3 attempts failed, the last with status 500: oh no")
    assert len(seen) == 3


async def test_a_service_that_is_not_there_is_invalid_with_the_reason() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/score"
        reward = await score(url)
    assert isinstance(reward, Invalid)
    assert f"{url}: 3 attempts failed" in reward.reason
    assert "Connect" in reward.reason


async def test_an_answer_that_is_no_json_is_invalid() -> None:
    async with service(lambda body: web.Response(text="<html>")) as (url, _):
        assert await score(url) == Invalid(reason=f"{url}: the answer is no JSON: <html>")


async def test_a_slow_service_is_given_up_at_the_deadline() -> None:
    release = asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        await release.wait()
        return web.json_response(1)

    app = web.Application()
    app.router.add_post("/", wait)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        assert await score(url, timeout_seconds=0.3) == Invalid(reason="timed out after 0.3 s")
    finally:
        release.set()
        await runner.cleanup()


async def test_an_unknown_argument_of_a_url_is_refused() -> None:
    part = RewardPart(source="http://127.0.0.1:1/", args={"token": "x"}, key="rollout.reward_fn[0]")
    with pytest.raises(ConfigError, match=r"reward_fn\[0\]\.args: .*takes one argument, batch"):
        await AsyncRewardWrapper([part]).start()

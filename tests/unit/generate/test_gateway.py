"""The gateway as OpenAI's own client sees it, over a real engine."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import pytest_asyncio

from offbeat.data.tokens import TextCodec
from offbeat.generate.client import TARGET, GeneratorSpec, RemoteGenerator
from offbeat.generate.gateway.answers import Answers, Ask, as_prompt
from offbeat.generate.gateway.http import MAX_OPEN_ANSWERS, Gateway, serve_gateway
from offbeat.launch.codec import encode
from offbeat.launch.inline import InlineScheduler
from offbeat.launch.protocols import WorkerSpec
from offbeat.types import Completion, GenerateRequest, GroupId, PolicyVersion, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAME = "tiny"
TOKEN = "the token of the test"
MAX_LEN = 512
SLOTS = 4

TEMPLATE = "{% for m in messages %}{{ m['content'] }}={% endfor %}"


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway that answers, and what is behind it."""

    url: str
    client: openai.AsyncOpenAI
    generator: RemoteGenerator
    codec: TextCodec

    async def raw(self, path: str, body: object, token: str = TOKEN) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, data=data, headers=headers) as response,
        ):
            return response.status, json.loads(await response.read())

    async def idle(self) -> None:
        """Return when no request holds or waits for a slot."""
        async with asyncio.timeout(10):
            while True:
                stats = await self.generator.stats()
                if not stats.running and not stats.waiting:
                    return
                await asyncio.sleep(0.01)

    async def busy(self) -> None:
        """Return when some request holds a slot."""
        async with asyncio.timeout(10):
            while True:
                if (await self.generator.stats()).running:
                    return
                await asyncio.sleep(0.01)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    chatty = tmp_path_factory.mktemp("gateway") / NAME
    shutil.copytree(folder, chatty)
    (chatty / "chat_template.jinja").write_text(TEMPLATE)
    spec = GeneratorSpec(
        model_path=str(chatty), dtype=None, device="cpu", slots=SLOTS, max_len=MAX_LEN
    )
    codec = TextCodec.open(chatty)
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(InlineScheduler())
        worker = await scheduler.start(
            WorkerSpec(name="generator", target=TARGET, payload=encode(spec))
        )
        generator = await stack.enter_async_context(RemoteGenerator(worker, request_timeout=30))
        answers = Answers(generator, codec=codec, max_len=MAX_LEN)
        gateway = Gateway(answers, name=NAME, token=TOKEN, version=lambda: PolicyVersion(7))
        at = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = await stack.enter_async_context(serve_gateway(gateway, at))
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0)
        )
        yield Served(url, client, generator, codec)


async def test_models_names_the_model_and_its_live_version(served: Served) -> None:
    (model,) = (await served.client.models.list()).data
    assert (model.id, model.owned_by) == (NAME, "offbeat")
    assert model.model_extra == {"version": 7, "max_model_len": MAX_LEN}
    assert (await served.client.models.retrieve(NAME)).id == NAME


@pytest.mark.parametrize(
    ("headers", "said"),
    [({}, {}), ({"Authorization": f"Bearer {TOKEN}"}, {"version": 7})],
)
async def test_health_needs_no_token_and_then_says_nothing_else(
    served: Served, headers: dict[str, str], said: dict[str, int]
) -> None:
    url = served.url.removesuffix("/v1") + "/health"
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(url) as response,
    ):
        assert (response.status, await response.json()) == (200, {"status": "ok", **said})


async def test_a_completion_counts_its_tokens_and_says_why_it_ended(served: Served) -> None:
    got = await served.client.completions.create(
        model=NAME, prompt="1+2", max_tokens=5, extra_body={"ignore_eos": True}
    )
    (choice,) = got.choices
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (
        len(served.codec.encode_prompt("1+2")),
        5,
        len(served.codec.encode_prompt("1+2")) + 5,
    )


async def test_ids_and_logprobs_belong_to_the_tokens_that_were_written(served: Served) -> None:
    prompt = served.codec.encode_prompt("7*6")
    got = await served.client.completions.create(
        model=NAME,
        prompt=prompt,
        max_tokens=12,
        seed=3,
        logprobs=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    (choice,) = got.choices
    extra = choice.model_extra or {}
    assert extra["prompt_token_ids"] == prompt
    assert choice.text == served.codec.decode(extra["token_ids"])
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [served.codec.decode([i]) for i in extra["token_ids"]]
    said = await served.client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "7*6"}],
        max_tokens=3,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    (choice,) = said.choices
    scored = choice.logprobs.content
    assert [c.token for c in scored] == [
        served.codec.decode([i]) for i in choice.model_extra["token_ids"]
    ]
    assert all(c.bytes == list(c.token.encode()) and c.logprob <= 0 for c in scored)


async def test_a_seed_gives_the_same_tokens_whatever_runs_beside(served: Served) -> None:
    async def ask(seed: int | None, tokens: int = 40) -> str:
        got = await served.client.completions.create(
            model=NAME,
            prompt="12345",
            max_tokens=tokens,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        return got.choices[0].text

    alone = await ask(5)
    crowded = await asyncio.gather(*(ask(None, 60 + i) for i in range(6)), ask(5), ask(6))
    assert crowded[-2] == alone
    assert crowded[-1] != alone
    assert len(set(crowded)) == len(crowded), "without a seed, or with another, answers differ"


async def test_n_answers_to_several_prompts_come_in_order(served: Served) -> None:
    prompts = ["11", "22", "33"]
    got = await served.client.completions.create(
        model=NAME, prompt=prompts, n=2, max_tokens=3, extra_body={"return_token_ids": True}
    )
    assert [c.index for c in got.choices] == list(range(6))
    read = [(c.model_extra or {})["prompt_token_ids"] for c in got.choices]
    assert read == [served.codec.encode_prompt(p) for p in prompts for _ in range(2)]


async def test_greedy_answers_are_equal(served: Served) -> None:
    got = await served.client.completions.create(
        model=NAME, prompt="9", n=3, max_tokens=8, temperature=0
    )
    assert len({c.text for c in got.choices}) == 1


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_adds_up_to_the_answer_without_one(served: Served, n: int) -> None:
    options: dict[str, Any] = {
        "model": NAME,
        "prompt": "31415",
        "n": n,
        "seed": 11,
        "max_tokens": 40,
        "logprobs": 1,
        "extra_body": {"return_token_ids": True},
    }
    whole = await served.client.completions.create(**options)
    stream = await served.client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    texts, ids, scores = [""] * n, [[] for _ in range(n)], [[] for _ in range(n)]
    reasons: dict[int, str] = {}
    *chunks, last = [chunk async for chunk in stream]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ids[choice.index] += (choice.model_extra or {})["token_ids"]
        scores[choice.index] += choice.logprobs.token_logprobs
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert len(chunks) > 2 * n, "the answers did not come in pieces"
    assert texts == [c.text for c in whole.choices]
    assert ids == [(c.model_extra or {})["token_ids"] for c in whole.choices]
    assert scores == [c.logprobs.token_logprobs for c in whole.choices]
    assert [reasons[i] for i in range(n)] == [c.finish_reason for c in whole.choices]
    assert not last.choices
    assert last.usage == whole.usage


async def test_a_chat_streams_its_role_first_and_its_reason_last(served: Served) -> None:
    options: dict[str, Any] = {
        "model": NAME,
        "messages": [
            {"role": "system", "content": "12"},
            {"role": "user", "content": [{"type": "text", "text": "34"}]},
        ],
        "seed": 2,
        "max_completion_tokens": 20,
        "extra_body": {"return_token_ids": True},
    }
    whole = await served.client.chat.completions.create(**options)
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert choice.model_extra["prompt_token_ids"] == served.codec.encode("12=34=")
    assert whole.system_fingerprint == "version-0"
    chunks = [c async for c in await served.client.chat.completions.create(**options, stream=True)]
    deltas = [c.choices[0].delta for c in chunks]
    assert [d.role for d in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(d.content for d in deltas) == choice.message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(
    served: Served, stream: bool
) -> None:
    options: dict[str, Any] = {"model": NAME, "prompt": "5", "seed": 4, "max_tokens": 60}
    free = await served.client.completions.create(**options, extra_body={"ignore_eos": True})
    text = free.choices[0].text
    stop = text[10:13]
    options |= {"stop": ["not in there at all", stop], "stream": stream}
    got = await served.client.completions.create(**options, extra_body={"ignore_eos": True})
    choices = [c.choices[0] async for c in got] if stream else got.choices
    assert "".join(c.text for c in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"


async def test_the_length_of_a_chat_that_names_none_is_what_fits(served: Served) -> None:
    got = await served.client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "1" * 480}],
        extra_body={"ignore_eos": True},
    )
    assert got.usage.total_tokens == MAX_LEN


REFUSED = [
    ({"prompt": "1", "echo": True}, "echo", "not supported"),
    ({"prompt": "1", "best_of": 4}, "best_of", "not supported"),
    ({"prompt": "1", "presence_penalty": 0.5}, "presence_penalty", "not supported"),
    ({"prompt": "1", "suffix": "."}, "suffix", "not supported"),
    ({"prompt": "1", "user": "me"}, "user", "not supported"),
    ({"prompt": "1", "logprobs": 5}, "logprobs", "5 is not 0 or 1"),
    ({"prompt": "1", "max_token": 5}, "max_token", "did you mean max_tokens?"),
    ({"prompt": "1", "beams": 5}, "beams", "there are ignore_eos, logprobs"),
    ({"prompt": "1", "n": 0}, "n", ">= 1"),
    ({"prompt": "1", "n": 1000}, "n", "<= 128"),
    ({"prompt": "1", "temperature": -1}, "temperature", ">= 0"),
    ({"prompt": "1", "temperature": 1e-40}, "temperature", "1e-40 is neither 0 (greedy) nor"),
    ({"prompt": "1", "temperature": 1e300}, "temperature", "nor between 0.001 and 1000"),
    ({"prompt": "1", "top_p": 0}, "top_p", "> 0"),
    ({"prompt": "1", "top_k": -1}, "top_k", ">= 0"),
    ({"prompt": "1", "top_k": 10**30}, "top_k", "<= 1000000"),
    ({"prompt": "1", "max_tokens": 0}, "max_tokens", ">= 1"),
    ({"prompt": "1", "n": 10**30}, "n", "<= 128"),
    ({"prompt": "1", "stop_token_ids": [2**63]}, "stop_token_ids", f"{2**63} is not between 0 and"),
    ({"prompt": "1", "stop_token_ids": [2**70]}, "stop_token_ids", f"{2**70} is not between 0 and"),
    ({"prompt": "1", "stop_token_ids": [50]}, "stop_token_ids", "50 is not between 0 and 49"),
    ({"prompt": "1", "stop_token_ids": [-1]}, "stop_token_ids", ">= 0"),
    ({"prompt": "1", "stop_token_ids": [3] * 65}, "stop_token_ids", "length <= 64"),
    ({"prompt": "1", "stop": ["x"] * 65}, "stop", "length <= 64"),
    ({"prompt": [1, 2**70]}, "prompt", f"token id {2**70} is not between 0 and"),
    ({"prompt": ["1"] * 2000}, "prompt", "2000 prompts with n 1 ask for 2000 answers, more than"),
    ({"prompt": ["1"] * 9, "n": 128}, "prompt", "9 prompts with n 128 ask for 1152 answers"),
    ({"messages": [{"role": "user", "content": "1"}], "top_k": 2**63}, "top_k", "<= 1000000"),
    ({"prompt": "1", "seed": "x"}, "seed", "expected `int | null`, got `str`"),
    ({"prompt": "1", "stop": [""]}, "stop", "length >= 1"),
    ({"prompt": "1", "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({}, "prompt", "required"),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": []}, "prompt", "not empty"),
    ({"prompt": [1, "a"]}, "prompt", "a list of token ids"),
    ({"prompt": [1, 100000]}, "prompt", "token id 100000 is not between 0 and"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "'wizard'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
    ({"messages": [{"role": "user"}]}, "messages", "content"),
    ({"messages": [{"role": "user", "content": "1"}], "tools": [{}]}, "tools", "not supported"),
    (
        {"messages": [{"role": "user", "content": "1"}], "logprobs": True, "top_logprobs": 3},
        "top_logprobs",
        "not supported",
    ),
    (
        {
            "messages": [{"role": "user", "content": "1"}],
            "max_tokens": 3,
            "max_completion_tokens": 4,
        },
        "max_completion_tokens",
        "contradicts max_tokens 3",
    ),
]


@pytest.mark.parametrize(("body", "param", "says"), REFUSED)
async def test_what_would_have_no_effect_is_refused_by_name(
    served: Served, body: dict[str, object], param: str, says: str
) -> None:
    path = "/chat/completions" if "messages" in body else "/completions"
    status, answer = await served.raw(path, body)
    error = answer["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert says in error["message"]
    assert param in error["message"]


async def test_parameters_that_ask_for_nothing_pass(served: Served) -> None:
    got = await served.client.completions.create(
        model=NAME,
        prompt="1",
        max_tokens=1,
        echo=False,
        best_of=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        stop=None,
    )
    assert len(got.choices) == 1


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1]", b'"x"', b"[" * 100_000, b'{"prompt":' * 100_000, b'{"prompt": "\\ud800"}'],
    ids=lambda data: repr(data[:10]),
)
async def test_a_body_that_is_no_json_object_is_refused(served: Served, data: bytes) -> None:
    status, answer = await served.raw("/completions", data)
    assert status == 400
    assert "JSON" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
async def test_a_body_that_is_not_in_its_encoding_is_refused_and_nothing_is_logged(
    served: Served, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Encoding": "gzip"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(served.url + path, data=b'{"prompt": "1"}', headers=headers) as response,
    ):
        answer = await response.json()
    assert (response.status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert caplog.messages == []


BROKEN = {
    "bytes that are no HTTP": b"\x16\x03\x01 hello\r\n\r\n",
    "a length that is no number": b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    "two lengths": b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "a header that is too long": b"GET /health HTTP/1.1\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
    "an encoding that nobody knows": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: strange\r\n\r\n"
    ),
}


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN)
async def test_what_is_no_http_request_is_a_400_that_names_no_server_and_is_not_logged(
    served: Served, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    address = served.url.removeprefix("http://").removesuffix("/v1")
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(sent)
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    assert head.startswith(b"HTTP/1.1 400 ") or head.startswith(b"HTTP/1.0 400 ")
    assert b"aiohttp" not in head
    assert b"Python" not in head
    error = json.loads(body)["error"]
    assert (error["type"], error["message"][:19]) == (
        "invalid_request_error",
        "not an HTTP request",
    )
    assert caplog.messages == []
    assert (await served.client.models.list()).data, "it does not answer any more"


async def test_errors_are_those_of_the_client(served: Served) -> None:
    stranger = openai.AsyncOpenAI(base_url=served.url, api_key="wrong", max_retries=0)
    async with stranger:
        with pytest.raises(openai.AuthenticationError, match="token is wrong or missing"):
            await stranger.models.list()
    with pytest.raises(openai.NotFoundError, match="the model is called 'tiny'"):
        await served.client.completions.create(model="other", prompt="1")
    with pytest.raises(openai.BadRequestError, match="not supported"):
        await served.client.completions.create(model=NAME, prompt="1", echo=True)
    with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings: Not Found"):
        await served.client.embeddings.create(model=NAME, input="1")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(
    served: Served, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.completions.create(
            model=NAME, prompt=[8] * 500, max_tokens=20, stream=stream
        )
    assert "500 tokens; with an answer of at most 20 it exceeds the context of 512" in str(
        caught.value
    )
    assert caught.value.code == "context_length_exceeded"


async def test_more_answers_than_may_be_open_are_refused_for_now(served: Served) -> None:
    async with asyncio.TaskGroup() as group:
        most = served.client.completions.create(
            model=NAME,
            prompt=["1"] * (MAX_OPEN_ANSWERS // 128),
            n=128,
            max_tokens=500,
            extra_body={"ignore_eos": True},
        )
        task = group.create_task(most)
        await served.busy()
        with pytest.raises(openai.RateLimitError, match=r"1024 answers are open.* try again later"):
            await served.client.completions.create(model=NAME, prompt="1")
        task.cancel()
    await served.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_frees_its_slots(served: Served, stream: bool) -> None:
    async def ask() -> None:
        got = await served.client.completions.create(
            model=NAME,
            prompt="1",
            n=SLOTS + 2,
            max_tokens=500,
            stream=stream,
            extra_body={"ignore_eos": True},
        )
        if stream:
            async for _ in got:
                pass

    before = (await served.generator.stats()).finished
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask())
        await served.busy()
        task.cancel()
    await served.idle()
    assert (await served.generator.stats()).finished == before


async def test_a_request_of_a_run_is_not_changed_by_questions_beside_it(served: Served) -> None:
    request = GenerateRequest(
        request_id="train-0-0-0",
        group_id=GroupId(0),
        sibling=0,
        turn=0,
        prompt_ids=np.array(served.codec.encode_prompt("1=")),
        params=SamplingParams(max_new_tokens=60, ignore_eos=True),
        seed=9,
    )
    alone = await served.generator.generate(request)
    async with asyncio.TaskGroup() as group:
        for i in range(2 * SLOTS):
            group.create_task(
                served.client.completions.create(
                    model=NAME, prompt="1=", seed=9, max_tokens=50 + i, temperature=0.7
                )
            )
        await served.busy()
        beside = await served.generator.generate(request)
    assert beside.token_ids.tolist() == alone.token_ids.tolist()
    assert beside.logprobs.tolist() == alone.logprobs.tolist()


async def test_of_many_answers_only_some_are_asked_of_the_generator_at_a_time(
    served: Served,
) -> None:
    most = 0

    class Counted:
        def __init__(self) -> None:
            self.now = 0

        async def generate(self, request: GenerateRequest) -> Completion:
            nonlocal most
            self.now += 1
            most = max(most, self.now)
            try:
                return await served.generator.generate(request)
            finally:
                self.now -= 1

    answers = Answers(Counted(), codec=served.codec, max_len=MAX_LEN, at_once=2)  # type: ignore[arg-type]  # has what is asked of it
    prompt = as_prompt(served.codec.encode("1+2"))
    ask = Ask(prompts=(prompt,), params=SamplingParams(max_new_tokens=3), n=7)
    assert len(await answers.whole(ask)) == 7
    assert most == 2

"""A model that answers: served, beside a run, and from the command line; real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from offbeat.model.init import init_model

SOON = 2.0
"""Seconds within which a server must have ended."""

HOSTILE = ({"stop_token_ids": [2**63]}, {"temperature": 1e-40}, {"top_k": 10**30})
"""What no engine can serve; one that tried would fail all that it serves beside it."""

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}={% endfor %}"


def url_of(command: Any) -> str:
    """Where a gateway says that it listens."""
    found = command.until("its address", lambda: re.search(r"http://\S+/v1", command.output))
    assert isinstance(found, re.Match)
    return found[0]


@contextmanager
def client_of(command: Any, api_key: str = "none") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url_of(command), api_key=api_key, max_retries=0) as client:
        yield client


def ask(lab: Any, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """``offbeat ARGUMENTS`` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "offbeat", *arguments],
        cwd=lab.folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=50,
    )


@pytest.fixture(scope="session")
def peaked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers depend on its prompt: far from uniform from the start."""
    folder = tmp_path_factory.mktemp("serving") / "peaked"
    sizes = {"layers": 1, "hidden": 16, "intermediate": 32, "heads": 2, "kv_heads": 2}
    init_model(folder, **sizes, max_len=4096, initializer_range=0.5)
    return folder


@pytest.fixture
def chatty(lab: Any, peaked: Path) -> Path:
    """The same with a chat template."""
    folder: Path = lab.folder / "chatty"
    folder.mkdir()
    for file in peaked.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def test_a_served_model_answers_until_ctrl_c(lab: Any, chatty: Path) -> None:
    server = lab.start("serve", str(chatty), "--port", "0", "--token", "secret", "--slots", "4")
    with client_of(server, "secret") as client:
        (model,) = client.models.list()
        assert model.id == "chatty"
        whole = client.completions.create(model="chatty", prompt="1+1", max_tokens=8, seed=1, n=2)
        again = client.completions.create(model="chatty", prompt="1+1", max_tokens=8, seed=1, n=2)
        assert [c.text for c in whole.choices] == [c.text for c in again.choices]
        question: Any = [{"role": "user", "content": "12"}]
        said = client.chat.completions.create(
            model="chatty", messages=question, max_tokens=30, seed=3
        )
        stream = client.chat.completions.create(
            model="chatty", messages=question, max_tokens=30, seed=3, stream=True
        )
        pieces = [chunk.choices[0].delta.content for chunk in stream]
        assert "".join(pieces) == said.choices[0].message.content
    with client_of(server, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    server.interrupt()
    assert server.end(within=SOON) == 130
    assert "Traceback" not in server.output


@pytest.mark.slow
@pytest.mark.invariant("I13")
def test_ctrl_c_ends_a_server_that_is_writing(lab: Any) -> None:
    server = lab.start("serve", "model", "--port", "0")
    with client_of(server) as client:
        stream = client.completions.create(
            model=client.models.list().data[0].id,
            prompt="1",
            max_tokens=4000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        server.interrupt()
        assert server.end(within=SOON) == 130
    assert "Traceback" not in server.output


@pytest.mark.slow
def test_sigterm_is_an_orderly_end(lab: Any) -> None:
    server = lab.start("serve", "model", "--port", "0")
    url_of(server)
    os.kill(server.pid, signal.SIGTERM)
    assert server.end(within=SOON) == 143, server.output
    assert "Traceback" not in server.output


def check_dead(server: Any) -> None:
    assert server.end(within=SOON) == 1
    assert re.search(r"generator \(pid \d+\) was killed by SIGKILL", server.output)
    assert "Traceback" not in server.output


@pytest.mark.invariant("I13")
def test_the_death_of_the_engine_is_a_503_and_ends_the_server(lab: Any) -> None:
    server = lab.start("serve", "model", "--port", "0")
    with client_of(server) as client:
        name = client.models.list().data[0].id
        victim = server.worker("generator")
        os.kill(victim, signal.SIGSTOP)  # no answer comes before the death
        death = [sys.executable, "-c", f"import os, time; time.sleep(0.3); os.kill({victim}, 9)"]
        with subprocess.Popen(death), pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=name, prompt="1", max_tokens=8)
    assert (caught.value.status_code, caught.value.code) == (503, "engine_unavailable")
    check_dead(server)


@pytest.mark.slow
@pytest.mark.invariant("I13")
def test_the_death_of_the_engine_is_the_last_event_of_a_stream(lab: Any) -> None:
    server = lab.start("serve", "model", "--port", "0")
    with client_of(server) as client:
        pieces = client.completions.create(
            model=client.models.list().data[0].id,
            prompt="1",
            max_tokens=4000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(pieces))
        os.kill(server.worker("generator"), signal.SIGKILL)
        with pytest.raises(openai.APIError) as caught:
            list(pieces)
    assert caught.value.code == "engine_unavailable"
    check_dead(server)


@pytest.mark.timeout(150)
def test_a_run_answers_while_it_trains_and_its_weights_do_not_notice(lab: Any) -> None:
    steps = ("total_train_steps=8", "saver.at_end=true", "rollout.reward_fn=task:slow")
    alone = lab.train(*steps, "trial_name=alone")
    run = lab.train(*steps, "trial_name=asked", "gateway.port=0", "gateway.token=secret")
    versions: set[int] = set()
    with client_of(run, "secret") as client:
        for option in HOSTILE:
            with pytest.raises(openai.BadRequestError, match=next(iter(option))):
                client.completions.create(model="e2e", prompt="1=", extra_body=option)
        while run.process.poll() is None and len(versions) < 3:
            (model,) = client.models.list()
            assert model.id == "e2e"
            got = client.completions.create(
                model="e2e", prompt="1111=", max_tokens=20, extra_body={"ignore_eos": True}
            )
            wrote = int((got.system_fingerprint or "").removeprefix("version-"))
            assert wrote >= (model.model_extra or {})["version"]
            versions.add(wrote)
    assert run.end() == 0, run.output
    assert "Traceback" not in run.output
    assert alone.end() == 0, alone.output
    assert len(versions) == 3, "answers of several versions, while the run went on"
    files = [
        lab.run_dir(t) / "checkpoints" / "latest" / "model.safetensors" for t in ("alone", "asked")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_taken_port_ends_a_run_before_anything_starts(lab: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        run = lab.train(f"gateway.port={other.getsockname()[1]}")
        assert run.end() == 2
    assert "gateway.port: cannot listen at 127.0.0.1" in run.output
    assert not (lab.folder / "asked-train").exists()


@pytest.mark.slow
def test_the_newest_checkpoint_of_a_run_is_asked(lab: Any) -> None:
    assert lab.train("saver.at_end=true").end() == 0
    done = ask(lab, "generate", "latest", "1111=", "--json", "--seed", "1", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    (answer,) = map(json.loads, done.stdout.splitlines())
    assert answer["prompt"] == "1111="
    assert len(answer["token_ids"]) == len(answer["logprobs"]) <= 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serve", "nowhere"), "there is no folder nowhere"),
        (("serve", "config.yaml"), "config.yaml is a configuration; name a model folder"),
        (("serve", "model", "--host", "0.0.0.0"), "--host: other machines can reach 0.0.0.0"),
        (("serve", "model", "--max-len", "5000"), "--max-len: 5000 is more than the 4096 tokens"),
        (("generate", "model"), "there is no prompt"),
        (("generate", "model", "1", "--temperature", "1e-40"), "--temperature: 1e-40 is neither 0"),
        (("generate", "model", "1+1=\udcff"), "prompt 1: character 5 of the text is the byte 0xff"),
        (
            ("generate", "model", "--file", "half.jsonl"),
            "half.jsonl:2: character 2 of the text is U+D800",
        ),
        (("generate", "model", "1", "--file", "rows.jsonl"), "give one of them"),
        (
            ("generate", "model", "--file", "rows.jsonl"),
            "rows.jsonl:2: has neither a text",
        ),
        (("generate", "model", "1", "--chat"), "has no chat template"),
        (("chat", "model", "--system", "be brief"), "a system message needs a chat template"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(
    lab: Any, arguments: tuple[str, ...], says: str
) -> None:
    (lab.folder / "rows.jsonl").write_text('{"prompt": "1"}\n{"question": "2"}\n')
    (lab.folder / "half.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2\\ud800"}\n')
    done = ask(lab, *arguments)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bytes_on_standard_input_that_are_no_text_are_named_with_their_line(
    lab: Any, locale: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "generate", "model"],
        cwd=lab.folder,
        env={**os.environ, "LC_ALL": locale},
        input=b"1+1=\n1+1=\xff\n",
        capture_output=True,
        timeout=50,
    )
    assert done.returncode == 2
    assert done.stderr.decode() == (
        "error: line 2: character 5 of the text is the byte 0xff, which is not UTF-8: a model "
        "reads Unicode text only\n"
    )


def test_generate_writes_n_answers_to_each_prompt_in_order(lab: Any, chatty: Path) -> None:
    rows = [{"prompt": "1"}, {"messages": [{"role": "user", "content": "2"}]}]
    (lab.folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    options = ("--n", "2", "--json", "--seed", "4", "--max-tokens", "6")
    done = ask(lab, "generate", str(chatty), "--file", "rows.jsonl", *options)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(a["prompt"], a["index"]) for a in answers] == [
        (shown, i) for shown in ("1", rows[1]["messages"]) for i in range(2)
    ]
    again = ask(lab, "generate", str(chatty), *options, stdin="1\n\n2\n")
    assert [json.loads(line)["prompt"] for line in again.stdout.splitlines()] == [
        "1",
        "1",
        "2",
        "2",
    ]
    assert [json.loads(line)["text"] for line in again.stdout.splitlines()][:2] == [
        a["text"] for a in answers[:2]
    ]


def test_chat_remembers_until_it_is_reset(lab: Any, chatty: Path) -> None:
    lines = ["12", "12", "/reset", "12", "/system 77", "12", "/nonsense", "/quit", "never read"]
    done = ask(lab, "chat", str(chatty), "--seed", "5", "--max-tokens", "6", stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    first, second, reset, system = done.stdout.splitlines()
    assert first == reset
    assert len({first, second, system}) == 3
    assert "/system TEXT" in done.stderr


@pytest.mark.slow
def test_chat_without_a_template_continues_each_line(lab: Any, peaked: Path) -> None:
    arguments = ("--seed", "5", "--max-tokens", "6")
    done = ask(lab, "chat", str(peaked), *arguments, stdin="12\n12\n 34")
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == second != third
    assert "no chat template" in done.stderr


@pytest.fixture
def endless(lab: Any) -> Path:
    """A model folder that names no end of sequence, so that an answer is as long as it may be."""
    folder: Path = lab.folder / "endless"
    shutil.copytree(lab.folder / "model", folder)
    for file in folder.glob("*config.json"):
        settings = json.loads(file.read_text())
        kept = {k: v for k, v in settings.items() if k not in ("eos_token_id", "eos_token")}
        file.write_text(json.dumps(kept))
    return folder


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(lab: Any, endless: Path) -> None:
    main, other = os.openpty()
    with os.fdopen(main, "r+b", buffering=0) as terminal:
        chat = subprocess.Popen(
            [sys.executable, "-m", "offbeat", "chat", str(endless), "--max-tokens", "4000"],
            cwd=lab.folder,
            stdin=other,
            stdout=other,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(other)
        seen = bytearray()

        def until(text: bytes) -> None:
            deadline = time.monotonic() + 50
            while text not in seen:
                assert time.monotonic() < deadline, seen
                seen.extend(terminal.read(4096))

        try:
            until(b"> ")
            for _ in range(2):
                seen.clear()
                terminal.write(b"1\n")
                until(b"1\r\n")
                terminal.read(1)  # the answer has begun
                seen.clear()
                os.killpg(chat.pid, signal.SIGINT)
                until(b"\r\n> ")
            terminal.write(b"\x04")
            assert chat.wait(10) == 0
        finally:
            chat.kill()
            chat.wait()

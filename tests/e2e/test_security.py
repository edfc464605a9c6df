"""Who is not of the run gets nothing: every socket of a run is found, and knocked at."""

from __future__ import annotations

import ast
import ipaddress
import os
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.generate.gateway.http import MAX_BODY_BYTES
from offbeat.observe.memory import process_tree
from offbeat.pipeline.chaos.processes import listening

SECRET = "the-token-of-the-gateway"
RUN_TOKEN = re.compile(rb"\b[0-9a-f]{64}\b")
"""What the token that a run makes for itself looks like."""

STRANGERS: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": f"Basic {SECRET}"},
    {"Authorization": "Bearer "},
]
CALLS = [
    ("GET", "/"),
    ("GET", "/health"),
    ("GET", "/rpc/stats"),
    ("POST", "/rpc/stats"),
    ("POST", "/rpc/submit"),
    ("POST", "/rpc/nothing-of-this-name"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/e2e"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/metrics"),
    ("GET", "/../../etc/passwd"),
    ("DELETE", "/v1/models/e2e"),
    ("PUT", "/rpc/stage"),
]
BODY = b'{"model": "e2e", "prompt": "1="}'
HEALTH = ("GET", "/health")
SPILLS = re.compile(
    rb"Traceback|File \"|aiohttp|Python/|/src/|/runs/|generator-|trainer|submit|torch",
    re.IGNORECASE,
)
"""What an answer to a stranger must not hold: versions, paths, names, methods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: bytes
    body: bytes


def ask(port: int, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> Answer:
    with closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        told = "\n".join(f"{name}: {value}" for name, value in response.getheaders())
        return Answer(status=response.status, headers=told.encode(), body=response.read())


def sockets(run: Any) -> list[tuple[str, int]]:
    return [found for pid in process_tree(run.pid) for found in listening(pid)]


def other_sockets(run: Any) -> list[str]:
    """Sockets that anybody could send to without TCP: datagrams, and named Unix sockets."""
    held = set()
    for pid in process_tree(run.pid):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            held.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table, column in (("udp", 9), ("udp6", 9), ("unix", 6)):
        for line in Path(f"/proc/{run.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            named = table != "unix" or len(fields) > 7
            if named and fields[column] in held:
                found.append(line)
    return found


def training(lab: Any, *overrides: str) -> Any:
    """A run with a gateway, two generators, a reward process and a writer, in its second step."""
    run = lab.train(
        "gateway.port=0",
        "generator.replicas=2",
        "saver.freq_steps=1",
        "total_train_steps=1000000",
        *overrides,
        env={**os.environ, "OFFBEAT_TOKEN": SECRET},
    )
    run.until("the first step", lambda: lab.groups("trained"))
    return run


def test_every_socket_of_a_run_is_on_loopback_and_refuses_strangers(lab: Any) -> None:
    run = training(lab)
    gateway = int(re.findall(r"http://127\.0\.0\.1:(\d+)/v1", run.output)[0])
    found = sockets(run)
    assert len(found) == 4, f"trainer, two generators, gateway: {found}"
    assert [a for a, _ in found if not ipaddress.ip_address(a).is_loopback] == []
    assert gateway in [port for _, port in found]
    assert other_sockets(run) == []
    for _, port in found:
        for method, path in CALLS:
            for headers in STRANGERS:
                answer = ask(port, method, path, headers, BODY)
                open_door = port == gateway and (method, path) == HEALTH
                where = f"port {port}, {method} {path}, {headers}: {answer}"
                assert answer.status == (200 if open_door else 401), where
                assert not SPILLS.search(answer.headers + answer.body), where
                assert not open_door or answer.body == b'{"status":"ok"}', where
    known = {"Authorization": f"Bearer {SECRET}"}
    assert ask(gateway, "GET", "/v1/models", known).status == 200
    workers = [port for _, port in found if port != gateway]
    assert [ask(port, *HEALTH, known).status for port in workers] == [401] * 3
    at = lab.groups("trained")
    run.until("another step", lambda: lab.groups("trained") > at)


@pytest.mark.slow
def test_no_token_is_in_arguments_environments_or_files(lab: Any) -> None:
    run = training(lab)
    for pid in process_tree(run.pid):
        shown = Path(f"/proc/{pid}/cmdline").read_bytes() + b"\0"
        shown += Path(f"/proc/{pid}/environ").read_bytes()
        assert not RUN_TOKEN.search(shown)
    run.interrupt()
    assert run.end(within=20) == 130, run.output
    files = [f for f in lab.run_dir().rglob("*") if f.is_file() and f.suffix != ".safetensors"]
    assert len(files) > 5
    for file in files:
        content = file.read_bytes()
        assert SECRET.encode() not in content, file
        if file.name not in ("manifest.json", "run.db"):  # the first holds digests
            assert not RUN_TOKEN.search(content), file
    assert SECRET not in run.output
    assert not RUN_TOKEN.search(run.output.encode())


@pytest.mark.slow
def test_what_is_too_large_is_refused_and_everybody_lives(lab: Any) -> None:
    run = training(lab)
    gateway = int(re.findall(r"http://127\.0\.0\.1:(\d+)/v1", run.output)[0])
    before = run.workers()
    known = {"Authorization": f"Bearer {SECRET}"}
    body = b'{"prompt": "' + b"1" * MAX_BODY_BYTES + b'"}'
    answer = ask(gateway, "POST", "/v1/completions", known, body)
    assert answer.status == 413, answer
    assert not SPILLS.search(answer.headers + answer.body)
    for port in (p for _, p in sockets(run)):
        assert claims_a_terabyte(port).startswith(b"HTTP/1.1 401 "), port
    at = lab.groups("trained")
    run.until("another step", lambda: lab.groups("trained") > at)
    assert {n: p for n, p in run.workers().items() if n != "rewards"} == {
        n: p for n, p in before.items() if n != "rewards"
    }


def claims_a_terabyte(port: int) -> bytes:
    """The answer to a stranger who announces more than anybody has memory for."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
        stranger.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1099511627776\r\n\r\n{"
        )
        return stranger.recv(1000)


# No pickle from a socket

UNPICKLERS = ("pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads")
BANNED = ("marshal", "shelve", "dill", "joblib", "multiprocessing", "torch.multiprocessing")
CHILD = "rollout/reward_worker.py"
"""Unpickles what its own parent sends over a socketpair; nothing comes back as a pickle."""

PICKLERS = {CHILD, "rollout/reward_pool.py", "rollout/reward_source.py"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    package = Path(offbeat.__file__).parent
    for file in sorted(package.rglob("*.py")):
        yield file.relative_to(package).as_posix(), ast.parse(file.read_text("utf-8"))


def imports(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_only_the_reward_processes_know_pickle_and_only_the_child_unpickles() -> None:
    importing = {name for name, tree in modules() if imports(tree) & {"pickle", "cloudpickle"}}
    assert importing == PICKLERS
    assert [name for name, tree in modules() if imports(tree) & set(BANNED)] == []
    unpickling = {
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in UNPICKLERS
    }
    assert unpickling == {CHILD}


def test_nothing_that_is_read_from_a_file_can_run_code() -> None:
    """``torch.load`` and ``numpy.load`` unpickle unless they are told not to; PyYAML has a twin."""
    for name, tree in modules():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            what, given = (
                ast.unparse(call.func),
                {k.arg: ast.unparse(k.value) for k in call.keywords},
            )
            if what == "torch.load":
                assert given.get("weights_only") == "True", f"{name}:{call.lineno}"
            assert given.get("allow_pickle", "False") == "False", f"{name}:{call.lineno}"
            assert what not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), name

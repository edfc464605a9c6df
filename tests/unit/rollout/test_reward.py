"""AsyncRewardWrapper with real processes: what works, what is Invalid, and what a failure costs."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from offbeat.errors import ConfigError, WorkerError
from offbeat.rollout.reward import AsyncRewardWrapper
from offbeat.rollout.reward_source import RewardPart
from offbeat.types import Invalid, Scored

Gone: TypeAlias = Callable[[int, float], bool]


def _reason(reward: object) -> str:
    assert isinstance(reward, Invalid), reward
    return reward.reason


async def test_lambdas_and_closures_work_and_a_number_is_usable_as_a_float() -> None:
    bonus = 0.5
    async with AsyncRewardWrapper(
        lambda text, **row: (text == row["answer"]) + bonus, workers=1
    ) as score:
        assert await score("4", answer="4") == Scored(value=1.5)
        assert float(await score("5", answer="4")) == 0.5


async def test_a_synchronous_function_that_returns_an_awaitable_is_awaited() -> None:
    async def half() -> float:
        return 0.5

    async with AsyncRewardWrapper(lambda: half(), workers=1) as score:
        assert await score() == Scored(value=0.5)


async def test_a_callable_object_and_an_asynchronous_callable_object_work() -> None:
    class Plain:
        def __call__(self) -> float:
            return 1.0

    class Async:
        async def __call__(self) -> float:
            await asyncio.sleep(0)
            return 2.0

    async with AsyncRewardWrapper(Plain()) as plain, AsyncRewardWrapper(Async()) as later:
        assert (await plain(), await later()) == (Scored(value=1.0), Scored(value=2.0))


async def test_what_is_not_a_number_is_invalid_and_never_zero() -> None:
    async with AsyncRewardWrapper(lambda value: value, workers=1) as score:
        for value, shown in [
            (None, "returned None"),
            (float("nan"), "returned nan"),
            (float("inf"), "returned inf"),
            ("1", "returned '1'"),
            ({"reward": None}, 'returned "reward" = None'),
        ]:
            assert _reason(await score(value)).startswith(shown)
        assert await score({"reward": 1, "format": 0.5}) == Scored(value=1.0, parts={"format": 0.5})
        assert score.counters.restarts == 0


async def test_an_exception_is_invalid_and_the_first_one_is_kept_with_its_traceback() -> None:
    class OddError(Exception):
        """Cannot be rebuilt from its arguments."""

        def __init__(self, where: str, what: str):
            super().__init__(f"{what} at {where}")

    def judge(kind: str) -> float:
        if kind == "odd":
            raise OddError("row 3", "no answer")
        if kind == "exit":
            sys.exit(3)
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "surrogate":
            raise ValueError("\ud800")
        raise ValueError("second")

    async with AsyncRewardWrapper(judge, workers=1) as score:
        assert score.first_error is None
        assert _reason(await score("odd")) == "OddError: no answer at row 3"
        assert _reason(await score("exit")) == "SystemExit: 3"
        assert _reason(await score("interrupt")) == "KeyboardInterrupt"
        assert _reason(await score("surrogate")) == "ValueError: ?"
        assert _reason(await score("other")) == "ValueError: second"
        assert score.first_error is not None
        assert score.first_error.error == "OddError"
        assert "in judge" in score.first_error.traceback
        assert "OddError: no answer at row 3" in score.first_error.traceback
        assert score.counters.restarts == 0


async def test_asynchronous_failures_do_not_end_the_event_loop_of_their_neighbors() -> None:
    async def judge(kind: str) -> float:
        await asyncio.sleep(0.05)
        if kind == "exit":
            sys.exit(3)
        if kind == "cancel":
            raise asyncio.CancelledError
        if kind == "raise":
            raise ValueError("no")
        return 1.0

    async with AsyncRewardWrapper(judge, workers=1) as score:
        kinds = ("exit", "cancel", "raise", "fine")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(score(kind)) for kind in kinds]
        assert [_reason(task.result()) for task in tasks[:3]] == [
            "SystemExit: 3",
            "the reward function canceled itself",
            "ValueError: no",
        ]
        assert tasks[3].result() == Scored(value=1.0)
        assert score.counters.restarts == 0


async def test_arguments_that_cannot_be_sent_are_invalid_with_the_reason() -> None:
    async with AsyncRewardWrapper(lambda value: 1.0, workers=1) as score:
        reason = _reason(await score(threading.Lock()))
        assert "arguments cannot be sent" in reason
        assert "lock" in reason
        assert await score(0) == Scored(value=1.0)


async def test_a_closure_that_cannot_be_sent_is_refused_with_the_alternative() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match='name it as "module:attr"'):
        await AsyncRewardWrapper(lambda: lock.locked())()


async def test_signal_alarm_works_inside_a_reward() -> None:
    def alarmed() -> float:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        signal.pause()
        return 1.0

    async with AsyncRewardWrapper(alarmed, workers=1) as score:
        assert await score() == Scored(value=1.0)


async def test_interrupts_belong_to_the_controller() -> None:
    def interrupted() -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return float(os.getsid(0) == os.getpid())

    async with AsyncRewardWrapper(interrupted, workers=1) as score:
        assert await score() == Scored(value=1.0)


async def test_what_a_reward_prints_goes_to_the_log_and_corrupts_nothing(tmp_path: Path) -> None:
    def noisy() -> float:
        print("hello", flush=True)  # noqa: T201
        os.write(1, b"\xff\x00\x00\x00 raw")
        sys.stderr.write("and errors\n")
        return 1.0

    log = tmp_path / "logs" / "reward.log"
    async with AsyncRewardWrapper(noisy, workers=1, log_path=log) as score:
        assert await score() == Scored(value=1.0)
    assert log.read_bytes() == b"hello\n\xff\x00\x00\x00 rawand errors\n"


@pytest.mark.invariant("I16")
async def test_a_reward_process_is_light_and_has_one_thread() -> None:
    def heavy() -> float:
        loaded = [name for name in ("torch", "transformers", "aiohttp") if name in sys.modules]
        return float(len(loaded)) + float(os.environ["OMP_NUM_THREADS"] != "1")

    async with AsyncRewardWrapper(heavy, workers=1) as score:
        assert await score() == Scored(value=0.0)


async def test_a_named_function_is_found_in_the_search_folder(tmp_path: Path) -> None:
    (tmp_path / "my_named_reward.py").write_text(
        "from offbeat.rollout.reward import AsyncRewardWrapper\n"
        "def plain(text): return len(text)\n"
        "async def later(text): return -len(text)\n"
        "wrapped = AsyncRewardWrapper(later)\n"
    )
    for attr, value in (("plain", 2.0), ("wrapped", -2.0)):
        spec = f"my_named_reward:{attr}"
        async with AsyncRewardWrapper(spec, search_dir=tmp_path, workers=1) as score:
            assert await score("ab") == Scored(value=value)


async def test_a_module_that_fails_to_import_is_a_config_error_with_its_traceback(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_broken_reward.py").write_text("scale = 1 / 0\ndef reward(): return 1\n")
    score = AsyncRewardWrapper("my_broken_reward:reward", search_dir=tmp_path, workers=1)
    for _ in range(2):
        with pytest.raises(ConfigError, match="ZeroDivisionError") as caught:
            await score()
        assert "scale = 1 / 0" in caught.value.__notes__[0]
        assert "Traceback" not in str(caught.value)
    await score.aclose()


async def test_a_missing_attribute_is_a_config_error_that_lists_what_there_is(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_other_reward.py").write_text("def reward(): return 1\n")
    score = AsyncRewardWrapper("my_other_reward:rewrad", search_dir=tmp_path)
    with pytest.raises(ConfigError, match="has no 'rewrad'; it has reward"):
        await score()
    await score.aclose()


@pytest.mark.invariant("I13")
async def test_processes_that_die_while_loading_stop_the_run_with_their_last_words(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_deadly_reward.py").write_text(
        "import os, sys\nprint('no license', file=sys.stderr, flush=True)\nos._exit(7)\n"
    )
    score = AsyncRewardWrapper(
        "my_deadly_reward:reward", search_dir=tmp_path, log_path=tmp_path / "log", workers=1
    )
    with pytest.raises(WorkerError, match="3 reward processes in a row") as caught:
        await score()
    assert "exit code 7" in str(caught.value)
    assert "no license" in str(caught.value)
    await score.aclose()


async def test_a_closed_wrapper_says_so_and_closing_twice_is_fine() -> None:
    score = AsyncRewardWrapper(lambda: 1.0)
    await score.aclose()
    await score.aclose()
    with pytest.raises(WorkerError, match="closed"):
        await score()


def test_unusable_limits_are_refused() -> None:
    async def call(**limits: float) -> object:
        return await AsyncRewardWrapper(lambda: 1.0, **limits)()  # type: ignore[arg-type]  # on purpose

    with pytest.raises(ConfigError, match="reward_timeout_seconds"):
        asyncio.run(call(timeout_seconds=0))
    with pytest.raises(ConfigError, match="workers"):
        asyncio.run(call(workers=0))


def test_a_wrapper_that_nobody_closes_works_in_one_event_loop_after_the_other(
    gone_within: Gone,
) -> None:
    score = AsyncRewardWrapper(lambda: os.getpid(), workers=1)
    first, second = (int(float(asyncio.run(score()))) for _ in range(2))  # type: ignore[arg-type]  # Scored
    assert first != second
    assert gone_within(first, 0)
    assert gone_within(second, 0)
    assert score.counters.calls == 2


@pytest.mark.invariant("I13")
@pytest.mark.parametrize(
    ("die", "told"),
    [
        (lambda: os._exit(3), "reward process died: exit code 3"),
        (lambda: ctypes.string_at(0), "reward process died: exit code -11 (SIGSEGV)"),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "reward process died: exit code -9 (SIGKILL; out of memory?)",
        ),
    ],
    ids=["exit", "segfault", "killed"],
)
async def test_a_death_is_invalid_for_its_own_job_only(
    die: object, told: str, tmp_path: Path
) -> None:
    assert callable(die)

    def judge(deadly: bool) -> float:
        if deadly:
            die()
        return 1.0

    async with AsyncRewardWrapper(judge, workers=1, log_path=tmp_path / "log") as score:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(score(deadly)) for deadly in (False, True, False)]
        assert _reason(tasks[1].result()) == told
        assert [tasks[0].result(), tasks[2].result()] == [Scored(value=1.0)] * 2
        assert score.counters.restarts == 1


@pytest.mark.invariant("I13")
def test_the_processes_die_with_a_controller_that_is_killed(gone_within: Gone) -> None:
    program = (
        "import asyncio, os\n"
        "from offbeat.rollout.reward import AsyncRewardWrapper\n"
        "def hang():\n"
        "    print(os.getpid(), flush=True)\n"
        "    while True: pass\n"
        "asyncio.run(AsyncRewardWrapper(hang)())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as controller:
        assert controller.stderr is not None
        busy = int(controller.stderr.readline())
        assert not gone_within(busy, 0)
        controller.kill()
        assert gone_within(busy, 2)


def test_a_program_that_closes_nothing_ends_cleanly() -> None:
    program = (
        "import asyncio\n"
        "from offbeat.rollout.reward import AsyncRewardWrapper\n"
        "score = AsyncRewardWrapper(lambda: 1.0)\n"
        "assert float(asyncio.run(score())) == 1.0\n"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program], capture_output=True, check=True, timeout=20
    )
    assert done.stderr == b""
    assert time.monotonic() - started < 10


# What is said of failures


async def test_the_first_time_out_is_reported_at_once_with_the_function_and_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def endless() -> float:
        while True:
            pass

    async with AsyncRewardWrapper(endless, timeout_seconds=0.2, workers=1) as score:
        await score()
    (message,) = caplog.messages
    assert "endless (test_reward.py:" in message
    assert "timed out after 0.2 s (rollout.reward_timeout_seconds)" in message


async def test_a_failure_is_told_in_full_once_and_then_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def raising(number: int) -> float:
        raise KeyError(number)

    async with AsyncRewardWrapper(raising, workers=1) as score:
        with caplog.at_level(logging.DEBUG, "offbeat.rollout"):
            for number in range(25):
                await score(number)
    first, trace, tenth = caplog.messages
    assert "KeyError: 0 (" in first
    assert "Traceback" in trace
    assert "in raising" in trace
    assert "10 calls failed with KeyError, the last: KeyError: 9" in tenth
    assert "Traceback" not in tenth


# Several functions, classes and arguments


async def test_fixed_arguments_reach_a_function_and_make_a_class(tmp_path: Path) -> None:
    (tmp_path / "my_scaled.py").write_text(
        "def scaled(completion, *, factor): return len(completion) * factor\n"
        "class Scaled:\n"
        "    def __init__(self, factor): self.factor = factor\n"
        "    def __call__(self, completion): return len(completion) * self.factor\n"
    )
    for attr in ("scaled", "Scaled"):
        part = RewardPart(source=f"my_scaled:{attr}", args={"factor": 3})
        async with AsyncRewardWrapper([part], search_dir=tmp_path, workers=1) as score:
            assert await score("", "ab", [], []) == Scored(value=6.0)


async def test_an_argument_that_the_function_has_not_is_refused_with_those_it_has() -> None:
    key = "rollout.reward_fn[1]"
    part = RewardPart(source="offbeat.rewards:exact_match", args={"ignorecase": True}, key=key)
    score = AsyncRewardWrapper([part], workers=1)
    with pytest.raises(ConfigError, match=r"reward_fn\[1\]\.args: 'ignorecase' .* ignore_case"):
        await score.start()
    await score.aclose()


async def test_a_call_with_other_arguments_than_the_standard_four_passes_them_on() -> None:
    async with AsyncRewardWrapper(lambda text, factor: len(text) * factor, workers=1) as score:
        assert await score("abc", factor=2) == Scored(value=6.0)
        with pytest.raises(ConfigError, match="none of the four known forms"):
            await score("a", "b", [], [])


async def test_a_wrapper_of_several_functions_can_be_wrapped_again() -> None:
    parts = [RewardPart(source=lambda completion: float(completion), name="number", weight=2.0)]
    async with AsyncRewardWrapper(AsyncRewardWrapper(parts), workers=1) as score:
        assert await score("", "4", [], []) == Scored(value=8.0, parts={"number": 4.0})

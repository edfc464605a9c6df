"""Claims about the console during a run: lines in a pipe, a panel in a terminal."""

import io
import math
import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest
from rich.console import Console

from offbeat.observe.console import ConsoleSink, console_sink, step_line
from offbeat.observe.metrics import dropped_name, no_signal_name
from offbeat.observe.panel import StepPanel
from offbeat.types import DropReason, NoSignal

FULL = {
    "reward/mean": 0.51234,
    "eval/reward_mean": 0.43,
    "lag/group_mean": 1.25,
    "lag/group_max": 4.0,
    "throughput/tokens_per_second": 12345.6,
    "wait/data_seconds": 123.45,
    "actor/entropy": 1.234,
    "actor/clip_fraction": 0.0123,
    "actor/grad_norm": 10.811,
    dropped_name(DropReason.STALE): 1.0,
    dropped_name(DropReason.FILTERED): 2.0,
}


def test_console_line_is_one_line_that_fits_120_columns_with_its_first_drop_reason() -> None:
    stream = io.StringIO()
    ConsoleSink(total_steps=1000, stream=stream).write(12, FULL)
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert "\x1b" not in line
    assert len(line.partition("  drop")[0]) <= 111
    for part in ("step   12/1000", "reward 0.512", "eval 0.430", "lag 1.2/4", "12.3k tok/s"):
        assert part in line
    for part in (
        "wait 123.5s",
        "ent 1.23",
        "clip 0.012",
        "grad 10.81",
        "drop 2 filtered, 1 stale",
    ):
        assert part in line


def test_console_line_names_invalid_rewards_only_when_there_are_some() -> None:
    assert step_line(3, {"reward/invalid_count": 7.0}).endswith("invalid rewards 7")
    assert "invalid" not in step_line(3, {"reward/invalid_count": 0.0})
    assert "invalid" not in step_line(3, {})


def without_signal(equal: int, cut: int = 0) -> dict[str, float]:
    return {
        "groups/trained_count": 16.0,
        no_signal_name(NoSignal.EQUAL): float(equal),
        no_signal_name(NoSignal.TRUNCATED): float(cut),
    }


def test_console_line_says_why_groups_teach_nothing_when_half_of_them_do() -> None:
    said = "12 of 16 groups teach nothing: all rewards equal"
    assert step_line(3, without_signal(12)).endswith(said)
    assert "teach nothing" not in step_line(3, without_signal(7))
    assert "8 of 16 groups teach nothing" in step_line(3, without_signal(8))
    assert step_line(3, without_signal(6, 4)).endswith(
        "10 of 16 groups teach nothing: all rewards equal (6), all answers cut by the length "
        "limit (4)"
    )
    assert "teach nothing" not in step_line(3, {})


def test_panel_says_why_groups_teach_nothing_as_long_as_they_do() -> None:
    panel = panel_of(3)
    panel.add(4, without_signal(12))
    assert "12 of 16 groups teach nothing" in drawn(panel)
    panel.add(5, without_signal(1))
    assert "teach nothing" not in drawn(panel)


def test_console_line_shows_what_was_not_measured_as_a_dash() -> None:
    line = step_line(1, {"reward/mean": math.nan})
    assert "reward nan" in line
    assert "eval -" in line
    assert "lag -/-" in line
    assert line.endswith("drop 0")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (999.4, "999"),
        (999.9, "1.0k"),
        (12_345.0, "12.3k"),
        (999_999.0, "1.0M"),
        (2e9, "2.0G"),
    ],
)
def test_token_rates_are_shown_in_five_characters(value: float, shown: str) -> None:
    assert f" {shown} tok/s" in step_line(1, {"throughput/tokens_per_second": value})


# The panel


def drawn(panel: StepPanel, width: int = 90, encoding: str = "utf-8") -> str:
    """The panel as it looks, without color."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, force_terminal=False)
    console.print(panel.draw(width))
    stream.flush()
    stream.seek(0)
    return stream.read()


def panel_of(steps: int, *, total: int | None = 40, encoding: str = "utf-8") -> StepPanel:
    panel = StepPanel(total, "exp/[red]trial\x1b[2J", encoding)
    for step in range(1, steps + 1):
        panel.add(step, {**FULL, "seconds": 2.0, "reward/mean": step / 40})
    return panel


def test_panel_shows_progress_newest_values_history_and_troubles() -> None:
    text = drawn(panel_of(10))
    assert "step 10/40  0:00:20 so far, 2.00 s a step, 0:01:00 to go" in text
    assert any(line.startswith("│ reward") for line in text.splitlines())
    for part in ("0.250", "▁▂▃▃▄▅▆▆▇█", "12.3k", "groups dropped: 20 filtered, 10 stale"):
        assert part in text
    assert {len(line) for line in text.splitlines()} == {90}


def test_title_of_the_panel_is_no_markup_and_cannot_touch_the_terminal() -> None:
    text = drawn(panel_of(1))
    assert "exp/[red]trial\\x1b[2J" in text
    assert "\x1b" not in text


def test_panel_of_a_terminal_without_utf8_is_ascii() -> None:
    assert drawn(panel_of(10, encoding="ascii"), encoding="ascii").isascii()


def test_panel_fits_a_narrow_terminal() -> None:
    assert {len(line) for line in drawn(panel_of(10), width=40).splitlines()} == {40}


def test_panel_of_a_run_without_a_fixed_length_has_no_bar_and_promises_no_end() -> None:
    text = drawn(panel_of(3, total=None))
    assert "step 3  0:00:06 so far, 2.00 s a step" in text
    assert "to go" not in text
    assert "━" not in text


def test_panel_leaves_out_what_was_never_measured_and_what_is_not_finite() -> None:
    panel = StepPanel(None, "", "utf-8")
    panel.add(0, {"eval/reward_mean": 0.5, "seconds": 1.0})
    panel.add(1, {"reward/mean": math.nan, "seconds": 1.0})
    text = drawn(panel)
    assert "eval" in text
    assert "reward" not in text


# Which of the two


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_notebook_pipe_and_dumb_terminal_get_lines_even_where_colors_are_forced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(console_sink(stream=io.StringIO()), ConsoleSink)
    assert not isinstance(console_sink(stream=Terminal()), ConsoleSink)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(console_sink(stream=Terminal()), ConsoleSink)


_RUN = """
import logging, sys, warnings
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
from offbeat.observe.console import console_sink
from offbeat.observe.sinks import SinkSet
sinks = SinkSet([console_sink(total_steps=3, title="exp/trial")])
print("run folder runs/exp/trial")
try:
    for step in (1, 2, 3):
        sinks.write(step, {"reward/mean": step / 10, "seconds": 1.0})
        logging.warning("group %d dropped", step)
        print(f"echo {step}")
        if step == 2:
            raise RuntimeError("the trainer died")
finally:
    sinks.close()
    logging.warning("after the end")
"""


def in_terminal(code: str, environment: Mapping[str, str], **streams: int) -> tuple[int, str]:
    """Exit code and everything that ``code`` writes to a terminal of 80 columns."""
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "30", **environment}
    env.pop("FORCE_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=follower,
        stdout=follower,
        stderr=streams.get("stderr", follower),
        env=env,
    ) as process:
        os.close(follower)
        output = bytearray()
        while True:
            try:
                output += os.read(leader, 1 << 16)
            except OSError:  # the last writer has closed its side
                break
        os.close(leader)
    return process.returncode, output.decode()


def screen(output: str) -> list[str]:
    """What is left on the screen: enough of a terminal for what the panel does."""
    lines, row, column = [""], 0, 0
    for control, arguments, letter, text in re.findall(
        r"(\x1b\[([?0-9;]*)([A-Za-z]))|([^\x1b])", output
    ):
        if control and letter == "A":
            row -= int(arguments or 1)
        elif control and letter == "K":
            lines[row] = ""
        elif text == "\r":
            column = 0
        elif text == "\n":
            row, column = row + 1, 0
            lines.extend([""] * (row + 1 - len(lines)))
        elif text:
            line = lines[row].ljust(column)
            lines[row], column = line[:column] + text + line[column + 1 :], column + 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("no_color", ["", "1"])
def test_panel_stays_below_what_is_printed_and_is_left_whole_before_the_error(
    no_color: str,
) -> None:
    code, output = in_terminal(_RUN, {"NO_COLOR": no_color})
    assert code == 1
    assert output.count("\x1b[1A") > 10, "it was drawn in place"
    assert output.index("\x1b[?25l") < output.index("\x1b[?25h"), "the cursor is shown again"
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]", output)) is not bool(no_color)
    left = screen(output)
    top = next(i for i, line in enumerate(left) if line.startswith("╭"))
    above = ["WARNING group 1 dropped", "echo 1", "WARNING group 2 dropped", "echo 2"]
    assert left[:top] == ["run folder runs/exp/trial", *above]
    assert "exp/trial" in left[top]
    assert "step 2/3" in left[top + 1]
    bottom = next(i for i, line in enumerate(left) if line.startswith("╰"))
    after = left[bottom + 1 :]
    assert after[0] == "WARNING after the end"
    assert after[1] == "Traceback (most recent call last):"
    assert "RuntimeError: the trainer died" in after
    assert sum(line.startswith("╭") for line in left) == 1, "one panel"


def test_errors_that_go_to_a_file_stay_out_of_the_terminal(tmp_path: os.PathLike[str]) -> None:
    file = os.path.join(tmp_path, "errors")
    with open(file, "w") as errors:
        code, output = in_terminal(_RUN, {}, stderr=errors.fileno())
    assert code == 1
    assert "WARNING" not in output
    with open(file) as errors:
        text = errors.read()
    assert text.startswith("WARNING group 1 dropped\nWARNING group 2 dropped\n")
    assert "RuntimeError: the trainer died" in text
    assert "\x1b" not in text

"""Claims about what a person sees of a run on disk."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from offbeat.errors import DataError
from offbeat.observe.ledger import LedgerTotals, TokenTotals
from offbeat.observe.limits import RunSetup
from offbeat.observe.metrics import PROX_APPROXIMATIONS, PROX_MEASURES, StepRecord, prox_name
from offbeat.observe.rollouts import RolloutLog
from offbeat.observe.show import (
    find_run,
    harmless,
    load_run,
    read_samples,
    run_json,
    run_text,
    samples_text,
    sparkline,
)
from offbeat.observe.sinks import JsonlSink
from offbeat.observe.spans import SpanName
from offbeat.observe.summary import RunStatus, RunTotals
from offbeat.types import (
    Completion,
    DropReason,
    GroupId,
    Invalid,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    Scored,
    StopReason,
    Turn,
)

SETUP = RunSetup(
    max_staleness=4,
    cores=1,
    trainer_threads=1,
    generator_threads=1,
    trains_in_bfloat16=False,
    generates_in_bfloat16=False,
    prefix_sharing=True,
    gradient_checkpointing=False,
    prox_pass=False,
)

GROUPS = LedgerTotals(
    admitted=9, trained=6, dropped=dict.fromkeys(DropReason, 0) | {DropReason.FAILED: 2}, open=1
)
TOKENS = TokenTotals(generated=200, trained=150, wasted={"failed": 50})


def make_run(path: Path, steps: int = 3, changed_at: float | None = None) -> Path:
    sink = JsonlSink(path / "metrics.jsonl")
    for record in records(steps):
        sink.write(record.step, record.flat())
    if changed_at is not None:
        os.utime(path / "metrics.jsonl", (changed_at, changed_at))
    return path


def records(steps: int) -> list[StepRecord]:
    return [
        StepRecord(
            step=i, version=i, seconds=1.0, metrics={"reward/mean": i / 10, "lag/group_mean": 1.0}
        )
        for i in range(1, steps + 1)
    ]


def end_run(path: Path, status: RunStatus, error: str | None = None) -> None:
    totals = RunTotals(0.0, records(3))
    summary = totals.summary(now=5.0, status=status, groups=GROUPS, tokens=TOKENS, error=error)
    summary.write(path / "summary.json")


def log_rollouts(path: Path) -> None:
    versions = np.array([2, 2, 3], dtype=np.int64)
    completion = Completion(
        token_ids=np.array([7, 8, 9], dtype=np.int64),
        logprobs=np.zeros(3, dtype=np.float32),
        versions=versions,
        stop_reason=StopReason.LENGTH,
        text="\x1b[2Jfirst\nsecond",
    )
    turn = Turn(prompt_ids=np.array([1], dtype=np.int64), completion=completion)
    rewards = [Scored(value=1.0, parts={"correct": 1.0})] * 3 + [Invalid(reason="timeout")]
    group = RolloutGroup(
        prompt=Prompt(group_id=GroupId(5), epoch=0, row=0, token_ids=turn.prompt_ids, text="2+2="),
        rollouts=tuple(Rollout(sibling=i, turns=(turn,), reward=r) for i, r in enumerate(rewards)),
        admission_version=PolicyVersion(2),
    )
    RolloutLog(path).write(3, [group])


@pytest.mark.parametrize(
    "asked", ["exp/b", "exp", "latest", "{root}", "{root}/exp", "{root}/exp/b"]
)
def test_newest_run_is_found_by_path_parent_name_and_latest(tmp_path: Path, asked: str) -> None:
    make_run(tmp_path / "exp" / "a", changed_at=1000.0)
    newest = make_run(tmp_path / "exp" / "b", changed_at=2000.0)
    assert find_run(asked.format(root=tmp_path), tmp_path) == newest


def test_older_run_is_found_by_its_own_path(tmp_path: Path) -> None:
    older = make_run(tmp_path / "exp" / "a", changed_at=1000.0)
    make_run(tmp_path / "exp" / "b", changed_at=2000.0)
    assert find_run(str(older), tmp_path) == older


def test_missing_folder_and_folder_without_a_run_say_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no folder nowhere nor .*nowhere"):
        find_run("nowhere", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: not a run.*metrics\.jsonl.*run\.db"):
        find_run("empty", tmp_path)
    with pytest.raises(DataError, match="there is no folder"):
        find_run("latest", tmp_path / "none")


def test_completed_run_shows_summary_and_curves(tmp_path: Path) -> None:
    end_run(make_run(tmp_path), RunStatus.COMPLETED)
    text = run_text(load_run(tmp_path))
    assert "completed after 3 steps" in text
    assert "9 admitted = 6 trained + 2 dropped (failed 2) + 1 open" in text
    assert "200 generated = 150 trained + 50 wasted, 25.0% wasted" in text
    assert "▁▅█  0.100 to 0.300" in text
    assert "\x1b" not in text


def test_limit_of_the_run_is_the_last_line(tmp_path: Path) -> None:
    totals = RunTotals(0.0, records(3), SETUP)
    totals.add_span(SpanName.WAIT, 0.0, 4.0)
    totals.add_training(4.0, 5.0)
    summary = totals.summary(now=5.0, status=RunStatus.COMPLETED, groups=GROUPS, tokens=TOKENS)
    summary.write(make_run(tmp_path) / "summary.json")
    view = load_run(tmp_path)
    assert summary.limit is not None
    assert run_text(view).splitlines()[-1] == f"limit     {summary.limit.sentence}"
    assert json.loads(run_json(view))["limit"]["what"] == "nothing"


def prox_records() -> list[StepRecord]:
    def record(step: int, tokens: float, error: float, largest: float) -> StepRecord:
        metrics = {"actor/tokens_count": tokens, "actor/prox_logp_mean": -1.5} | {
            prox_name(a, m): error for a in PROX_APPROXIMATIONS for m in PROX_MEASURES
        }
        metrics["actor/prox_error_linear_max"] = largest
        return StepRecord(step=step, version=step, seconds=1.0, metrics=metrics)

    return [record(1, 30.0, 0.01, 0.75), record(2, 10.0, 0.05, 0.25)]


def test_errors_of_the_proximal_approximations_are_a_table_of_means_over_steps(
    tmp_path: Path,
) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for r in [*prox_records(), StepRecord(step=3, version=3, seconds=1.0)]:
        sink.write(r.step, r.flat())
    view = load_run(tmp_path)
    table = json.loads(run_json(view))["prox"]
    assert table["actor/prox_error_linear_mean"] == pytest.approx((0.01 * 30 + 0.05 * 10) / 40)
    assert table["actor/prox_error_linear_max"] == 0.75
    assert len(table) == 1 + len(PROX_APPROXIMATIONS) * len(PROX_MEASURES)
    text = run_text(view)
    head = next(i for i, line in enumerate(text.splitlines()) if line.startswith("prox "))
    title, columns, *rows = text.splitlines()[head:]
    assert "mean -1.5000 nats" in title
    assert "2 steps' mean" in title
    assert [row.split()[0] for row in rows] == list(PROX_APPROXIMATIONS)
    assert {len(row) for row in rows} == {len(columns)}
    assert rows[1].split()[1:5] == ["0.02", "0.02", "0.75", "2.00%"]


def test_run_that_did_not_measure_the_approximations_has_no_table(tmp_path: Path) -> None:
    view = load_run(make_run(tmp_path))
    assert "prox" not in run_text(view)
    assert "prox" not in json.loads(run_json(view))


def test_run_without_a_summary_shows_what_it_has_so_far(tmp_path: Path) -> None:
    make_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ver')
    view = load_run(tmp_path)
    assert view.summary.status is RunStatus.UNFINISHED
    assert (view.summary.steps, view.summary.reward.last) == (3, 0.3)
    assert "unfinished (still running, or killed) after 3 steps" in run_text(view)
    assert json.loads(run_json(view))["status"] == "unfinished"


def test_run_that_has_written_only_its_configuration_can_be_shown(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mode: sync\n")
    assert "after 0 steps" in run_text(load_run(find_run(str(tmp_path))))


def test_failed_run_shows_its_error(tmp_path: Path) -> None:
    end_run(make_run(tmp_path), RunStatus.FAILED, "StallError: group 7 waits for generator-0")
    text = run_text(load_run(tmp_path))
    assert "failed after 3 steps" in text
    assert "error     StallError: group 7 waits for generator-0" in text
    assert json.loads(run_json(load_run(tmp_path)))["error"].startswith("StallError")


def test_json_has_summary_keys_and_curves_by_step(tmp_path: Path) -> None:
    end_run(make_run(tmp_path), RunStatus.COMPLETED)
    found = json.loads(run_json(load_run(tmp_path)))
    assert found["run"] == str(tmp_path)
    assert found["groups"]["admitted"] == 9
    assert found["curves"]["reward"] == [[1, 0.1], [2, 0.2], [3, 0.3]]
    assert found["curves"]["eval"] == []
    assert "samples" not in found


def test_samples_show_prompt_answer_reward_and_versions_and_cannot_touch_the_terminal(
    tmp_path: Path,
) -> None:
    log_rollouts(make_run(tmp_path))
    rows = read_samples(tmp_path, 2)
    assert [r.sibling for r in rows] == [0, 2]
    text = samples_text(read_samples(tmp_path, 99))
    assert "group 5.0  reward 1.000 (correct 1)" in text
    assert "group 5.3  reward invalid (timeout)" in text
    assert "stop length  3 tokens  versions 2, 3 (admitted at 2)" in text
    assert "  prompt | 2+2=" in text
    assert "  answer | \\x1b[2Jfirst\n         | second" in text
    assert "\x1b" not in text
    sample = json.loads(run_json(load_run(tmp_path), rows))["samples"][0]
    assert (sample["reward"], sample["versions"], sample["stop_reason"]) == (1.0, [2, 3], "length")


def test_long_text_is_cut_and_says_so(tmp_path: Path) -> None:
    log_rollouts(make_run(tmp_path))
    text = samples_text(read_samples(tmp_path, 1), limit=6)
    assert "[10 more characters]" in text
    assert "second" not in text


def test_samples_of_a_run_without_rollouts_are_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none are recorded"):
        read_samples(make_run(tmp_path), 3)


def test_sparkline_is_flat_for_equal_values_and_never_wider_than_asked() -> None:
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([0.0, 7.0]) == "▁█"
    assert len(sparkline([float(i % 17) for i in range(1000)], width=30)) == 30
    assert sparkline([float(i) for i in range(80)], width=8) == "▁▂▃▄▅▆▇█"


def test_harmless_escapes_control_characters_only() -> None:
    assert harmless("é✓\n\t\x1b\u202e") == "é✓\n\\t\\x1b\\u202e"

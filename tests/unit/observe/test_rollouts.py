"""Claims about the Parquet files of rollouts."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from offbeat.errors import DataError
from offbeat.observe.rollouts import RolloutLog, read_rollouts, read_update, recorded_steps
from offbeat.types import (
    Completion,
    GroupId,
    Invalid,
    PolicyVersion,
    Prompt,
    Reward,
    Rollout,
    RolloutGroup,
    Scored,
    StopReason,
    Turn,
)


def completion(ids: list[int], version: int, text: str) -> Completion:
    return Completion(
        token_ids=np.array(ids, dtype=np.int64),
        logprobs=np.array([-0.1 * i for i in ids], dtype=np.float32),
        versions=np.full(len(ids), version, dtype=np.int64),
        stop_reason=StopReason.STOP,
        text=text,
    )


def turn(prompt: list[int], answer: Completion) -> Turn:
    return Turn(prompt_ids=np.array(prompt, dtype=np.int64), completion=answer)


def group(group_id: int, rewards: list[Reward], *turns: Turn) -> RolloutGroup:
    prompt_ids = np.array([5, 6], dtype=np.int64)
    prompt = Prompt(group_id=GroupId(group_id), epoch=1, row=3, token_ids=prompt_ids, text="2+2=")
    return RolloutGroup(
        prompt=prompt,
        rollouts=tuple(Rollout(sibling=i, turns=turns, reward=r) for i, r in enumerate(rewards)),
        admission_version=PolicyVersion(4),
    )


ONE_TURN = turn([5, 6], completion([7, 8], 4, "4"))


def test_rollout_is_read_back_as_it_was(tmp_path: Path) -> None:
    reward = Scored(value=1.5, parts={"correct": 1.0, "format": 0.5})
    RolloutLog(tmp_path).write(12, [group(9, [reward], ONE_TURN)], {(GroupId(9), 0): 0.25})
    assert os.listdir(tmp_path / "rollouts") == ["step-000012.parquet"]
    (row,) = read_rollouts(tmp_path, 12)
    assert (row.step, row.group_id, row.sibling, row.epoch, row.row) == (12, 9, 0, 1, 3)
    assert (row.prompt, row.answer, row.stop_reason) == ("2+2=", "4", StopReason.STOP)
    assert (row.reward, row.invalid_reason, row.advantage) == (1.5, None, 0.25)
    assert row.reward_parts == {"correct": 1.0, "format": 0.5}
    assert row.admission_version == 4
    assert row.prompt_ids.tolist() == [5, 6]
    assert row.token_ids.tolist() == [7, 8]
    assert row.loss_mask.tolist() == [True, True]
    assert row.versions.tolist() == [4, 4]
    assert row.logprobs.dtype == np.float32
    np.testing.assert_array_equal(row.logprobs, ONE_TURN.completion.logprobs)


def test_record_of_the_update_is_read_back_and_files_without_one_are_still_read(
    tmp_path: Path,
) -> None:
    log = RolloutLog(tmp_path)
    log.write(1, [group(1, [Scored(value=1.0)], ONE_TURN)])
    log.write(2, [group(1, [Scored(value=1.0)], ONE_TURN)], None, '{"ü": 1}')
    assert read_update(tmp_path, 1) is None
    assert read_update(tmp_path, 2) == '{"ü": 1}'
    assert len(read_rollouts(tmp_path, 1)) == len(read_rollouts(tmp_path, 2)) == 1


def test_invalid_reward_is_null_with_its_reason_and_no_zero(tmp_path: Path) -> None:
    rewards = [Invalid(reason="timeout"), Scored(value=0.0)]
    RolloutLog(tmp_path).write(1, [group(1, rewards, ONE_TURN)])
    invalid, zero = read_rollouts(tmp_path)
    assert (invalid.reward, invalid.invalid_reason) == (None, "timeout")
    assert (zero.reward, zero.invalid_reason) == (0.0, None)
    assert invalid.advantage is None


def test_mask_of_several_turns_is_true_where_the_policy_wrote(tmp_path: Path) -> None:
    first = turn([5, 6], completion([7, 8], 4, "ask"))
    second = turn([5, 6, 7, 8, 90, 91], completion([10], 5, "answer"))
    RolloutLog(tmp_path).write(1, [group(1, [Scored(value=1.0)], first, second)])
    (row,) = read_rollouts(tmp_path)
    assert row.answer == "ask\nanswer"
    assert row.token_ids.tolist() == [7, 8, 90, 91, 10]
    assert row.loss_mask.tolist() == [True, True, False, False, True]
    assert row.versions.tolist() == [4, 4, -1, -1, 5]
    assert row.logprobs[2:4].tolist() == [0.0, 0.0]


def test_empty_answer_and_text_that_is_no_utf8_are_kept(tmp_path: Path) -> None:
    odd = turn([5, 6], completion([], 4, "a\ud800\x00b"))
    RolloutLog(tmp_path).write(1, [group(1, [Scored(value=1.0)], odd)])
    (row,) = read_rollouts(tmp_path)
    assert row.answer == "a?\x00b"
    assert row.token_ids.tolist() == []


def test_newest_step_is_read_by_default_and_a_missing_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none are recorded"):
        read_rollouts(tmp_path)
    log = RolloutLog(tmp_path)
    for step in (2, 10):
        log.write(step, [group(step, [Scored(value=1.0)], ONE_TURN)])
    assert recorded_steps(tmp_path) == (2, 10)
    assert read_rollouts(tmp_path)[0].step == 10
    with pytest.raises(DataError, match=r"no rollouts of step 3; recorded are steps 2 to 10"):
        read_rollouts(tmp_path, 3)


def test_step_without_groups_writes_an_empty_file(tmp_path: Path) -> None:
    RolloutLog(tmp_path).write(1, [])
    assert read_rollouts(tmp_path, 1) == ()


def test_torn_file_is_a_data_error_with_its_name(tmp_path: Path) -> None:
    RolloutLog(tmp_path).write(1, [group(1, [Scored(value=1.0)], ONE_TURN)])
    path = tmp_path / "rollouts" / "step-000001.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"step-000001\.parquet"):
        read_rollouts(tmp_path, 1)


_LIMITED = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_rollouts import ONE_TURN, group
from offbeat.observe.rollouts import RolloutLog
from offbeat.types import Scored
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
log = RolloutLog(Path(sys.argv[1]))
for step in (1, 2):
    log.write(step, [group(1, [Scored(value=1.0)], ONE_TURN)])
print(log.failure)
"""


def test_full_disk_leaves_no_half_file_and_stops_nothing(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", _LIMITED, str(tmp_path), here]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "writing rollouts to" in done.stdout
    assert os.listdir(tmp_path / "rollouts") == []
    assert done.stderr.count("training goes on") == 1


def test_pyarrow_is_not_imported_before_the_first_write() -> None:
    code = "import sys, offbeat.observe.show; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.invariant("I16")
def test_observing_needs_no_torch() -> None:
    modules = [
        "attempts",
        "files",
        "ledger",
        "metrics",
        "rollouts",
        "show",
        "sinks",
        "spans",
        "summary",
    ]
    imports = ", ".join(f"offbeat.observe.{m}" for m in modules)
    code = (
        f"import sys, {imports}, offbeat.pipeline.ledger\n"
        "print({'torch', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

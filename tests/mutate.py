"""Switch off each invariant's mechanism and see a test that holds the invariant fail.

    python tests/mutate.py [--only I07] [--list]

Works on a copy of the tree. A mutation of ``TABLE`` is one line with the invariant, the tests that
hold it and what is switched off; then lines ``file old => new``, files below src/offbeat, ``\\n``
for a new line. Only tests with the invariant's mark are run, slow ones where they are named. Text
that is not found exactly once is an error. All of it takes about ten minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLE = r"""
I01 unit/pipeline/test_staleness.py: one ticket more than the bound is admitted
pipeline/staleness.py + 1) * self._groups_per_step => + 1) * self._groups_per_step + 1
I01 unit/pipeline/test_staleness.py: tickets end with their batch, before its version is live
pipeline/staleness.py return len(self._line) + len(self._training) => return len(self._line)
I01 unit/pipeline/test_loop_choices.py: under the policy drop, groups that are too late are taken
pipeline/staleness.py _completed.values() if self._in_time(t)) => _completed.values())
pipeline/loop.py for group_id, group in self._manager.stale().items() => for group_id, group in ()
I02 unit/pipeline/test_ledger.py: a second fate overwrites the first
pipeline/ledger.py = ? AND superseded_by IS NULL AND fate IS NULL => = ? AND superseded_by IS NULL
I02 unit/pipeline/test_loop.py: groups that are open when the run ends get no fate
pipeline/loop.py for group_id, group in self._open.items(): => for group_id, group in ():
I02 unit/pipeline/test_loop.py: a dropped group is not recorded
pipeline/loop.py self._recorder.dropped(group_id, outcome => "".format(group_id, outcome
I02 unit/generate/test_remote_generator.py: a delivery that comes twice counts twice
generate/client.py if d.number <= self._received => if False
I02 unit/generate/test_mailbox.py: a request sent again runs beside the earlier one of its name
generate/mailbox.py {*cancelled, *(r.request_id for r in requests)} => set(cancelled)
I03 unit/pipeline/test_loop.py: batches are taken in the order of completion
pipeline/staleness.py oldest = islice(self._line.values( => oldest = islice(self._completed.values(
I03 unit/pipeline/test_episodes.py: the random stream of an answer depends on the time
pipeline/episodes.py self._plan.stream, self._key => self._plan.stream, time.monotonic_ns()
I03 unit/generate/engine/test_engine.py: an answer's random stream is that of its slot
generate/engine/sampler.py u = uniforms(seeds => u = uniforms(torch.arange(len(seeds))
I03 unit/train/test_actor_update.py: minibatches are cut in a new order each time
train/actor.py derive(self._seed, "minibatch", produce) => time.monotonic_ns()
I04 unit/train/test_state.py: the optimizer's moments are not restored
train/engine.py restore_moments(self._optimizer, named, _below(_OPTIMIZER, state)) => pass
I04 unit/train/test_state.py: the learning-rate schedule starts anew
train/engine.py fast_forward(self._scheduler, optimizer_steps) => pass
I04 unit/train/test_train_service.py: the optimizer steps while the state is still being copied
train/service.py , before_step=self._state.maybe_wait_for_staging =>
I04 unit/pipeline/test_staleness.py: open groups are not asked again
pipeline/staleness.py deque(start.open_groups) => deque(())
I04 unit/pipeline/test_snapshots.py: a snapshot is written before the record of its step
pipeline/snapshots.py await taken.recorded.wait() => pass
I04 unit/pipeline/test_resume.py: groups are admitted before the restored version is committed
pipeline/loop.py await self._generator.commit(update.version)\n        th => pass\n        th
I04 unit/pipeline/test_ledger.py: groups that a snapshot does not know keep their old fate
pipeline/ledger.py WHERE group_id >= ? AND => WHERE group_id < 0 * ? AND
I05 unit/rollout/test_recorded_samples.py: which weights wrote a token is not read back
rollout/samples.py , row.versions]) => , 0 * row.versions])
I05 unit/pipeline/test_update_record.py: records do not say where their update started
pipeline/update_record.py _before, update.digest => _before, self._before
I05 e2e/test_replay.py::test_one_changed_number: a replay does not compare the digests
pipeline/replay.py if produced.digest != update.record.digest => if False
I06 unit/generate/engine/test_weight_swap.py: every token gets the version that ended the answer
generate/engine/engine.py _per_token(running.versions, => _per_token([(0, self.version)],
I06 unit/generate/engine/test_weight_swap.py: prompts of the old weights are shared after a swap
generate/engine/engine.py self._prompts.clear()\n        if => if
I06 unit/generate/test_healing.py: a new process begins with the weights of the model folder
generate/healing.py if self._live is not None => if False
I06 unit/pipeline/test_loop.py: tokens of versions that cannot be are trained on
pipeline/loop.py self._check_versions(groups) => pass
I07 unit/train/test_gradients.py: the trainer ignores the temperature
train/engine.py head.bias, targets, temperature, => head.bias, targets, 1.0,
I07 unit/algo/test_logprobs.py: the trainer has a formula of its own
algo/logprobs.py gather_logprobs(x, z, y)) => torch.log_softmax(x, -1).gather(1, y[:, None])[:, 0])
I07 unit/generate/engine/test_recorded_logprobs.py: a truncated distribution is not renormalized
generate/engine/sampler.py - share.log().float() =>
I08 unit/algo/test_surrogate.py: the ratio is not taken to the proximal policy
algo/surrogate.py log_ratio(logp, prox_logp.detach(), => log_ratio(logp, 0 * prox_logp.detach(),
I08 unit/train/test_gradients.py: proximal log-probs are recomputed without the temperature
train/actor.py batch.select(rows), self._temperature => batch.select(rows), 1.0
I09 unit/train/test_gradients.py: denominators are those of the micro-batch
train/actor.py micro_rows, counts) => micro_rows, _Counts(tokens=tokens, rows=len(micro_rows)))
I09 unit/model/test_attention.py: a row of a pack sees the end of the row before it
model/attention.py prefix + place, own) => prefix + place, np.maximum(own - 1, 0))
I10 unit/train/test_gradients.py: the cap of the behavior weight is ignored
algo/behavior.py kept = kept & ~(rho > cap) => pass
I10 unit/train/test_gradients.py: the recorded log-probs do not reach the loss
train/actor.py behave_logp=micro.behave_logp,\n            adv => behave_logp=prox,\n            adv
I10 unit/train/test_gradients.py: the entropy bonus is left out
train/actor.py if self._config.entropy_coef => if False
I11 unit/checkpoint/test_snapshot.py: digests are not checked when a folder is read
checkpoint/manifest.py if digest != expected.digest => if False
I11 unit/checkpoint/test_saver.py: the error of a save is swallowed
checkpoint/manager.py if failure is not None => if False
I11 unit/checkpoint/test_folders.py: a folder appears that was not flushed
checkpoint/folders.py _sync_tree(aside)\n => \n
I11 unit/checkpoint/test_writer.py: a folder is written in its place
checkpoint/folders.py aside = _hidden(final, "tmp")\n    shutil => aside = final\n    shutil
checkpoint/folders.py _rename(aside, final)\n    except => pass\n    except
I12 unit/pipeline/test_loop.py: a stall has no deadline
pipeline/loop.py raise self._stalled(step) from None => continue
I12 unit/pipeline/test_loop.py: the report of a stall does not name what is pending
pipeline/loop.py {pending_text(self._pending_groups())} =>
I12 unit/checkpoint/test_saver.py: the wait for the writer has no deadline
checkpoint/manager.py self._deadline):\n                return => None):\n                return
I13 unit/launch/test_launch_orphans.py: a worker outlives its parent
launch/worker.py ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) => pass
launch/worker.py loop.add_reader(control, stop) => pass
I13 unit/launch/test_launch_alive.py: nobody watches the workers
launch/alive.py [watching.create_task(watch(w)) for w in workers] => []
I13 unit/rollout/test_reward_pool.py: what a reward function started is not killed with it
rollout/reward_process.py os.killpg(self.pid, => os.kill(self.pid,
I14 unit/weights/test_memory.py: the digest is not checked when weights are staged
weights/memory.py if digest != update.digest => if False
I14 unit/weights/test_memory.py: a commit leaves one tensor out
weights/memory.py name, source in tensors.items() => name, source in list(tensors.items())[1:]
I15 unit/config/test_bad_configurations.py: unknown keys are ignored
config/schema.py _unknown(str(key), cls) for key in mapping if key not in known => *()
I15 unit/config/test_bad_configurations.py: contradictions are not looked for
config/schema.py list(self._contradictions()) => []
I16 unit/test_imports.py: the loop imports torch
pipeline/loop.py import logging\n => import logging\nimport torch\n
I16 unit/config/test_loading.py: the configuration imports torch
config/run.py from __future__ import annotations => from __future__ import annotations; import torch
"""

REPO = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "models", "runs")
SELECTION = "OFFBEAT_MUTATE"  # environment variable; for the copy's pytest, ``I01 tests/…`` a line
LIMIT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """``edits`` are file, old text and new text."""

    invariant: str
    tests: str
    what: str
    edits: list[tuple[str, str, str]] = field(default_factory=list)


def read(table: str) -> list[Mutation]:
    mutations: list[Mutation] = []
    for line in table.strip().splitlines():
        if head := re.fullmatch(r"(I\d\d) (\S+): (.*)", line):
            mutations.append(Mutation(invariant=head[1], tests=f"tests/{head[2]}", what=head[3]))
        else:
            file, text = line.split(" ", 1)
            old, new = (part.strip(" ").replace(r"\n", "\n") for part in text.split("=>"))
            mutations[-1].edits.append((f"src/offbeat/{file}", old, new))
    return mutations


def apply(mutation: Mutation, tree: Path) -> None:
    for file, old, new in mutation.edits:
        text = (tree / file).read_text()
        if text.count(old) != 1:
            sys.exit(f"{file}: found {text.count(old)} times, expected once: {old!r}")
        (tree / file).write_text(text.replace(old, new))


def run(tree: Path, mutations: Sequence[Mutation], *options: str) -> tuple[int | None, str]:
    """Exit code (None: not over in time) and output of the tests of ``mutations`` in ``tree``."""
    chosen = {f"{m.invariant} {m.tests}" for m in mutations}
    files = sorted({m.tests.partition("::")[0] for m in mutations})
    told = {
        "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree / 'tests'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tree.parent),
        SELECTION: "\n".join(sorted(chosen)),
    }
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutate"]
    output = tree.parent / "output.txt"
    with output.open("w") as log:
        process = subprocess.Popen(
            [*argv, *options, *files],
            cwd=tree, env={**os.environ, **told}, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        code: int | None = process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = None
    return code, output.read_text(errors="replace")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """In the copy's pytest, which loads this file as a plugin: keep what SELECTION asks for."""
    found = importlib.util.find_spec("offbeat")
    if found is None or not str(found.origin).startswith(str(config.rootpath)):
        sys.exit(f"offbeat is imported from {found}, not from the copy in {config.rootpath}")
    chosen = [line.split(" ") for line in os.environ[SELECTION].splitlines()]
    items[:] = [item for item in items if any(_is_chosen(item, *line) for line in chosen)]


def _is_chosen(item: Any, invariant: str, tests: str) -> bool:
    marked = any(invariant in mark.args for mark in item.iter_markers("invariant"))
    named = "::" in tests or item.get_closest_marker("slow") is None
    return marked and named and item.nodeid.startswith(tests)


def kill(mutation: Mutation, tree: Path) -> bool:
    """Whether a test fails because of ``mutation``; says which."""
    began = time.monotonic()
    before = {tree / file: (tree / file).read_text() for file, _, _ in mutation.edits}
    apply(mutation, tree)
    code, output = run(tree, [mutation], "-x", "--timeout=20")
    for file, text in before.items():
        file.write_text(text)
    failed = re.findall(r"^FAILED \S+?::(\w+)", output, re.MULTILINE)
    killed = code == 1 and bool(failed)
    how = f"killed by {failed[0]}" if killed else f"SURVIVED (pytest ended with {code})"
    seconds = time.monotonic() - began
    print(f"{mutation.invariant} {how} ({seconds:.1f} s)  {mutation.what}", flush=True)  # noqa: T201
    return killed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="I07", help="the mutations of one invariant")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    told = parser.parse_args()
    mutations = [m for m in read(TABLE) if told.only in (None, m.invariant)]
    if told.list:
        print(*(f"{m.invariant} {m.what}: {m.tests}" for m in mutations), sep="\n")  # noqa: T201
        return 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        tree = Path(shutil.copytree(REPO, Path(folder) / "tree", ignore=NOT_COPIED))
        code, output = run(tree, mutations)
        if code != 0:
            sys.exit(f"the tests must pass on the tree as it is:\n{output[-4000:]}")
        survived = [m for m in mutations if not kill(m, tree)]
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())

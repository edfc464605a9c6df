"""How long generation stands still for new weights, against one copy of them in memory.

Publisher and generator live in this process, so nothing but the work itself is timed: ``publish``
copies the trainer's parameters into shared memory, ``stage`` maps and verifies them and prepares
the generator's own copy while generation could go on, ``commit`` is the pause. The copy it is
compared with writes as many float32 values from one place to another, both touched before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import Json, Spread, arguments, cores, emit, facts, note, peak_rss_mb, ratios, rss_mb


def main() -> None:
    options = _parser().parse_args()
    emit({**facts("publish", options), **_measure(options)}, options.out)


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__ or "", runs=9)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser


def _measure(options: argparse.Namespace) -> Json:
    import torch

    torch.set_num_threads(options.threads or cores())
    trained, subscriber = _ends(options.model, getattr(torch, options.dtype))
    from offbeat.types import PolicyVersion
    from offbeat.weights.memory import MemoryPublisher

    values = sum(p.numel() for p in trained.values())
    source, target = torch.ones(values), torch.ones(values)
    seconds: dict[str, list[float]] = {k: [] for k in ("copy", "publish", "stage", "commit")}
    resident = []
    with MemoryPublisher(trained.items()) as publisher:
        for run in range(options.runs + 2):
            version = PolicyVersion(run + 1)
            note(f"round {run}")
            with _timed(seconds["copy"]):
                target.copy_(source)
            with _timed(seconds["publish"]):
                update = publisher.publish(version)
            with _timed(seconds["stage"]):
                subscriber.stage(update)
            with _timed(seconds["commit"]):
                subscriber.commit(version)
            resident.append(rss_mb())
    # The first two rounds touch memory for the first time.
    kept = {name: v[2:] for name, v in seconds.items()}
    return {
        "weights_mb": values * 4 / 1e6,
        "seconds": {name: Spread.of(v).as_json() for name, v in kept.items()},
        "pause_over_copy": ratios(kept["commit"], kept["copy"]).as_json(),
        "resident_mb_after_commit": Spread.of(resident[2:]).as_json(),
        "peak_mb": peak_rss_mb(),
    }


def _ends(model: Path, dtype: Any) -> tuple[dict[str, Any], Any]:
    """The trainer's parameters by name, and the subscriber of a generator's model."""
    import torch

    from offbeat.model.linear import pack_for_inference, use_onednn
    from offbeat.model.load import load_model
    from offbeat.weights.memory import MemorySubscriber, Parameters

    cpu = torch.device("cpu")
    trainer = load_model(str(model), dtype=torch.float32, device=cpu)
    generator = load_model(str(model), dtype=dtype, device=cpu)
    packed = use_onednn(None, dtype, generator)
    live = (
        pack_for_inference(generator) if packed else Parameters(dict(generator.named_parameters()))
    )
    return dict(trainer.named_parameters()), MemorySubscriber(live)


@contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - started)


if __name__ == "__main__":
    main()

"""Specs for the services of ``launch_services``."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.launch.protocols import WorkerSpec

HERE = str(Path(__file__).parent)

# Inline workers resolve "launch_services:..." in this process, as local ones do through PYTHONPATH.
sys.path.append(HERE)
PATHS = os.pathsep.join([HERE, *sys.path])

MakeSpec = Callable[..., WorkerSpec]


@pytest.fixture(scope="session")
def make_spec() -> MakeSpec:
    def make(factory: str = "open_echo", **fields: object) -> WorkerSpec:
        env = {"PYTHONPATH": PATHS, **fields.pop("env", {})}
        fields = {"name": "echo-0", "start_timeout_seconds": 20.0, **fields}
        return WorkerSpec(target=f"launch_services:{factory}", env=env, **fields)

    return make

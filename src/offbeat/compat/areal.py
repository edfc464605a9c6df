"""AReaL's import paths, resolved to offbeat's classes.

Owns one table: their module and name to ours. ``install()`` makes ``from areal.… import …`` work
in this process; ``python -m offbeat.compat.areal SCRIPT [ARGUMENT]...`` runs a script that way,
also one that awaits at its top level. A name that offbeat does not have is an ``ImportError`` that
says what there is instead.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType

ROOT = "areal"

NAMES: Mapping[str, Mapping[str, str]] = {
    "areal.api.cli_args": {
        "AsyncMode": "offbeat.config",
        "GenerationHyperparameters": "offbeat.config:GenerationConfig",
        "MegatronEngineConfig": "offbeat.config",
        "NormConfig": "offbeat.config",
        "OptimizerConfig": "offbeat.config",
        "PPOActorConfig": "offbeat.config",
        "ProxLogpMethod": "offbeat.config",
        "SaverConfig": "offbeat.config",
    },
    "areal.infra.async_task_runner": {"AsyncTaskRunner": "offbeat.pipeline.task_runner"},
    "areal.infra.scheduler.local": {"LocalScheduler": "offbeat.launch.local"},
    "areal.infra.staleness_manager": {"StalenessManager": "offbeat.pipeline.staleness"},
    "areal.trainer.ppo.actor": {
        "PPOActor": "offbeat.train.actor",
        "PPOTrainer": "offbeat.pipeline.run",
    },
    "areal.utils.async_checkpoint": {
        "AsyncCheckpointManager": "offbeat.checkpoint.manager",
        "AsyncMode": "offbeat.config",
    },
    "areal.utils.async_reward_wrapper": {"AsyncRewardWrapper": "offbeat.rollout.reward"},
    "areal.utils.constants": {"ProxLogpMethod": "offbeat.config"},
    "areal.utils.saver": {"Saver": "offbeat.checkpoint.saver"},
    "areal.workflow.rlvr": {"RLVRWorkflow": "offbeat.rollout.rlvr"},
}
"""Their module to their name to our module, with ``:NAME`` where ours has another."""

LATER: Mapping[str, Mapping[str, str]] = {
    "areal.engine.megatron_engine": {
        "MegatronEngine": "offbeat has no Megatron engine yet: the whole model trains in one "
        "process. The section megatron of a configuration loads"
    },
    "areal.infra.scheduler.slurm": {
        "SlurmScheduler": "offbeat has no Slurm scheduler yet: LocalScheduler (scheduler.type: "
        "local) runs everything on one machine"
    },
}
"""Their module to a name that offbeat does not have to why, and what there is."""


def install() -> None:
    """Make AReaL's import paths resolve to offbeat's classes. Twice is fine.

    Raises:
        ImportError: AReaL itself can be imported here; hiding it would be a trap.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    real = importlib.util.find_spec(ROOT)
    if real is not None:
        raise ImportError(
            f"AReaL is installed ({real.origin}), and offbeat does not hide it; use an environment "
            "without it, or import offbeat's own names"
        )
    sys.meta_path.insert(0, _Finder())


def modules() -> frozenset[str]:
    """Every module path that ``install`` provides, packages included."""
    leaves = NAMES.keys() | LATER.keys()
    return frozenset(
        ".".join(parts[:n])
        for parts in (leaf.split(".") for leaf in leaves)
        for n in range(1, len(parts) + 1)
    )


class _Finder(MetaPathFinder, Loader):
    """Finds and makes the modules of the tables; a module looks its names up when asked."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in modules():
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name.partition(".")[0] != ROOT:
            return None
        raise ImportError(
            f"offbeat does not provide the module {name}; it provides {', '.join(sorted(NAMES))}",
            name=name,
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Python's own kind of module will do."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        ours, later = NAMES.get(name, {}), LATER.get(name, {})

        def find(attribute: str) -> object:
            if attribute in ours:
                return _ours(ours[attribute], attribute)
            if attribute in later:
                raise ImportError(f"{name}.{attribute}: {later[attribute]}", name=name)
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            known = f"it provides {', '.join(ours)}" if ours else "it has no names of its own"
            raise ImportError(f"offbeat does not provide {name}.{attribute}; {known}", name=name)

        vars(module).update(__getattr__=find, __all__=list(ours))


def _ours(place: str, attribute: str) -> object:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name or attribute)


def run_script(path: Path, arguments: Sequence[str] = ()) -> None:
    """Run a Python file as ``__main__``, with AReaL's paths installed.

    Top-level ``await`` is allowed, as in a notebook.

    Raises:
        OSError, SyntaxError: the file cannot be read or compiled.
    """
    install()
    code = compile(path.read_bytes(), str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    main = ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(_awaited(code, vars(main)))
    else:
        exec(code, vars(main))


async def _awaited(code: object, namespace: dict[str, object]) -> None:
    await eval(code, namespace)  # type: ignore[arg-type]  # a coroutine: see CO_COROUTINE


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m offbeat.compat.areal SCRIPT [ARGUMENT]...")
    if not Path(sys.argv[1]).exists() or Path(sys.argv[1]).is_dir():
        sys.stderr.write(f"error: there is no script {sys.argv[1]}\n")
        sys.exit(2)
    # The module of this name, not __main__'s second copy of it.
    importlib.import_module("offbeat.compat.areal").run_script(Path(sys.argv[1]), sys.argv[2:])

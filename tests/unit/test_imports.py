"""The shape of the package: which room may import which, and the constructs that nobody may use."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "offbeat"

ROWS = {
    **dict.fromkeys(("errors", "types", "protocols", "seeds", "config"), 0),
    **dict.fromkeys(("algo", "data", "observe", "weights", "launch", "model", "rewards"), 1),
    **dict.fromkeys(("rollout", "generate", "train", "checkpoint"), 2),
    "pipeline": 3,
    **dict.fromkeys(("cli", "__main__", "compat"), 4),
    "__init__": 5,
}
"""A room or module imports from lower rows and from itself; nobody from the public names."""

WITHIN_ROW = {
    ("protocols", "types"): "the seams are written in terms of the nouns",
    ("config", "errors"): "all that the configuration needs of the package",
    ("__main__", "cli"): "python -m offbeat is the command line",
}
"""Edges between neighbors, each with its reason. ``config`` imports nothing else."""

LATE_ROOMS = ("cli", "__main__", "launch")
"""Where a function may import: the commands, and the processes that are started."""

LATE = {
    ("data/files.py", "pyarrow"): "loads for a third of a second; only Parquet files need it",
    ("config/loading.py", "offbeat"): "OmegaConf and PyYAML take longer than all else of --help",
    ("model/gguf.py", "torch"): "model init and import run in the process of the command line",
    ("model/gguf.py", "transformers"): "as above",
    ("model/hub.py", "huggingface_hub"): "loads for a third of a second; few commands need it",
    ("model/init.py", "torch"): "model init runs in the process of the command line",
    ("model/init.py", "transformers"): "as above",
    ("model/init.py", "safetensors"): "safetensors.torch loads torch",
    ("model/init.py", "tokenizers"): "as above; needed only when a model is made",
    ("model/load.py", "transformers"): "loads for seconds; attention is used without it in tests",
    ("observe/drawing.py", "matplotlib"): "an extra; needed only for pictures",
    ("observe/rollouts.py", "pyarrow"): "loads for a third of a second; show needs it for samples",
    ("observe/trackers/kinds.py", "offbeat"): "each imports its tracker, in its own process",
    ("observe/trackers/trackio.py", "trackio"): "reads its environment while it is imported",
    ("rewards/symbolic.py", "math_verify"): "an extra, and sympy loads for seconds",
    ("train/optim.py", "transformers"): "loads for seconds; a constant rate needs none of it",
}
"""Imports inside a function outside of those rooms: file and package, with the reason."""

BROAD = {
    ("errors.py", "boundary"): "classifies at the seam and raises again",
    ("pipeline/task_runner.py", "_run"): "hands it to whoever waits for the task",
}
"""Functions that may catch everything without raising it again as it was."""

SWALLOWS_CANCELLATION = {
    ("rollout/reward_worker.py", "_run_sync"): "user code without an event loop raised it itself",
}
"""Functions in which a CancelledError may end."""


def sources() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    assert len(found) > 50
    return found


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def room_of(name: str) -> str:
    return name.partition("/")[0].removesuffix(".py")


def imported(node: ast.AST) -> list[str]:
    """Modules that an import statement names, ``from offbeat import x`` as ``offbeat.x``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.level:
            return ["." * node.level]
        module = node.module or ""
        names = [alias.name for alias in node.names]
        return [f"offbeat.{n}" for n in names] if module == "offbeat" else [module]
    return []


def wrong_edges(name: str, tree: ast.AST) -> Iterator[str]:
    """Imports of other rooms that the rule forbids."""
    room = room_of(name)
    for node in ast.walk(tree):
        for module in imported(node):
            where = f"{name}:{getattr(node, 'lineno', 0)}: {room} imports {module}"
            if module.startswith("."):
                yield f"{where}: relative imports hide the edge"
            if not module.startswith("offbeat."):
                continue
            target = module.split(".")[1]
            if target == room or (room, target) in WITHIN_ROW:
                continue
            row = ROWS.get(target, ROWS["__init__"])  # a public name comes from the package itself
            if room == "config" or row >= ROWS[room]:
                yield f"{where}: row {ROWS[room]} may not import row {row}"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def late_imports(tree: ast.AST) -> set[str]:
    """Packages that are imported inside a function."""
    nodes = (node for function in functions(tree) for node in ast.walk(function))
    return {module.partition(".")[0] for node in nodes for module in imported(node)}


def called(node: ast.AST) -> str:
    """``asyncio.shield`` of ``asyncio.shield(x)``; empty for anything but a call."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def keywords(node: ast.AST) -> dict[str, str]:
    return {k.arg or "**": ast.unparse(k.value) for k in getattr(node, "keywords", ())}


def banned(name: str, tree: ast.AST) -> Iterator[str]:
    """Constructs that have hung or hidden something in systems like this."""
    for node in ast.walk(tree):
        what = _banned(node)
        if what:
            yield f"{name}:{getattr(node, 'lineno', 0)}: {what}"
    for function in functions(tree):
        for node in ast.walk(function):
            if isinstance(node, ast.ExceptHandler):
                what = _swallowed(name, function.name, node)
                if what:
                    yield f"{name}:{node.lineno}: {what}"
    for node in getattr(tree, "body", ()):
        what = _side_effect(node)
        if what:
            yield f"{name}:{node.lineno}: {what}"


def _banned(node: ast.AST) -> str:
    call = called(node)
    owner, _, method = call.rpartition(".")
    if method == "create_task" and (owner == "asyncio" or "loop" in owner or "(" in owner):
        return f"{call}: a task outside of a TaskGroup; nobody waits for it"
    if method in ("ensure_future", "run_coroutine_threadsafe"):
        return f"{call}: a task outside of a TaskGroup"
    if method == "gather" and "return_exceptions" in keywords(node):
        return "gather(return_exceptions): a failure becomes a value"
    if method == "shield":
        return "asyncio.shield: what is shielded outlives its owner"
    if keywords(node).get("daemon", "False") != "False":
        return "a daemon thread or process"
    if isinstance(node, ast.Assign) and any(
        isinstance(t, ast.Attribute) and t.attr == "daemon" for t in node.targets
    ):
        return "a daemon thread or process"
    if call == "print":
        return "print: the command line echoes, everything else logs"
    return ""


def _swallowed(name: str, function: str, handler: ast.ExceptHandler) -> str:
    caught = ast.unparse(handler.type) if handler.type is not None else "everything"
    again = isinstance(handler.body[-1], ast.Raise)
    names = {n.strip("() ").rpartition(".")[2] for n in caught.split(",")}
    as_it_was = again and getattr(handler.body[-1], "exc", caught) is None
    if names & {"Exception", "BaseException", "everything"} and not as_it_was:
        return "" if (name, function) in BROAD else f"except {caught} in {function}"
    if "CancelledError" in names and not again:
        known = (name, function) in SWALLOWS_CANCELLATION
        return "" if known else f"except {caught} in {function}: a cancellation ends here"
    return ""


def _side_effect(node: ast.AST) -> str:
    text = ast.unparse(node)
    if isinstance(node, ast.Assign | ast.AugAssign) and text.startswith("os.environ"):
        return "importing the module writes the environment"
    setup = ("basicConfig", "set_event_loop")
    if isinstance(node, ast.Expr) and called(node.value).endswith(setup):
        return "importing the module sets up the process"
    return ""


# The package


def test_every_room_is_in_a_row() -> None:
    rooms = {room_of(name_of(file)) for file in sources()}
    assert rooms - set(ROWS) == set()


@pytest.mark.parametrize("file", sources(), ids=name_of)
def test_a_room_imports_from_lower_rows_and_from_itself(file: Path) -> None:
    assert list(wrong_edges(name_of(file), ast.parse(file.read_text()))) == []


def test_imports_inside_functions_are_those_with_a_reason() -> None:
    found = {
        (name, package)
        for name, tree in ((name_of(f), ast.parse(f.read_text())) for f in sources())
        if room_of(name) not in LATE_ROOMS
        for package in late_imports(tree)
    }
    assert found - set(LATE) == set(), "without a reason"
    assert set(LATE) - found == set(), "reasons that nothing needs any more"


@pytest.mark.parametrize("file", sources(), ids=name_of)
def test_no_module_uses_a_banned_construct(file: Path) -> None:
    assert list(banned(name_of(file), ast.parse(file.read_text()))) == []


def test_every_exception_from_the_rules_is_still_needed() -> None:
    known = {
        (name_of(f), function.name)
        for f in sources()
        for function in functions(ast.parse(f.read_text()))
    }
    assert set(BROAD) | set(SWALLOWS_CANCELLATION) <= known


def test_every_module_says_what_it_is_for() -> None:
    silent = [name_of(f) for f in sources() if not ast.get_docstring(ast.parse(f.read_text()))]
    assert silent == []


# The rules themselves


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("errors.py", "import offbeat.types"),
        ("config/run.py", "from offbeat.types import Prompt"),
        ("config/run.py", "from offbeat.seeds import derive"),
        ("data/stream.py", "from offbeat.observe import metrics"),
        ("algo/kl.py", "def f():\n    from offbeat.pipeline.run import PPOTrainer"),
        ("rollout/rlvr.py", "from offbeat.generate.client import RemoteGenerator"),
        ("train/actor.py", "from offbeat import cli"),
        ("train/actor.py", "from . import pack"),
        ("cli.py", "from offbeat import PPOTrainer"),
    ],
)
def test_a_forbidden_edge_is_found(name: str, text: str) -> None:
    (message,) = wrong_edges(name, ast.parse(text))
    assert room_of(name) in message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config/run.py", "from offbeat.errors import ConfigError"),
        ("protocols.py", "from offbeat.types import Prompt"),
        ("data/stream.py", "from offbeat.data.tokens import TextCodec\nimport torch"),
        ("pipeline/loop.py", "from offbeat.train.client import RemoteTrainer"),
        ("cli.py", "from offbeat.pipeline.run import PPOTrainer"),
    ],
)
def test_an_allowed_edge_passes(name: str, text: str) -> None:
    assert list(wrong_edges(name, ast.parse(text))) == []


@pytest.mark.parametrize(
    "text",
    [
        "asyncio.create_task(f())",
        "asyncio.get_running_loop().create_task(f())",
        "self._loop.create_task(f())",
        "asyncio.ensure_future(f())",
        "await asyncio.gather(a, b, return_exceptions=True)",
        "await asyncio.shield(f())",
        "threading.Thread(target=f, daemon=True)",
        "thread.daemon = True",
        "print('x')",
        "os.environ['A'] = 'b'",
        "logging.basicConfig()",
        "def f():\n    try:\n        g()\n    except Exception:\n        return 0",
        "def f():\n    try:\n        g()\n    except Exception as e:\n        raise E from e",
        "def f():\n    try:\n        g()\n    except:\n        pass",
        "def f():\n    try:\n        g()\n    except (OSError, BaseException):\n        h()",
        "def f():\n    try:\n        g()\n    except asyncio.CancelledError:\n        return",
    ],
)
def test_a_banned_construct_is_found(text: str) -> None:
    assert len(list(banned("loop.py", ast.parse(text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "group.create_task(f())",
        "await asyncio.gather(a, b)",
        "threading.Thread(target=f, daemon=False)",
        "def f():\n    try:\n        g()\n    except BaseException:\n        h()\n        raise",
        "def f():\n    try:\n        g()\n    except OSError:\n        pass",
        "def f():\n    os.environ['A'] = 'b'",
    ],
)
def test_a_permitted_construct_passes(text: str) -> None:
    assert list(banned("loop.py", ast.parse(text))) == []


# What is really loaded


@pytest.mark.invariant("I16")
@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import offbeat", ("torch", "transformers", "aiohttp", "numpy", "omegaconf")),
        ("import offbeat.cli", ("torch", "transformers", "aiohttp", "omegaconf")),
        ("import offbeat.pipeline.run, offbeat.cli", ("torch", "transformers")),
        ("import offbeat.rollout.reward_worker", ("torch", "transformers", "aiohttp")),
        ("import offbeat.checkpoint.writer", ("torch", "transformers", "aiohttp")),
    ],
)
def test_a_process_that_needs_no_model_loads_no_torch(
    statement: str, absent: tuple[str, ...]
) -> None:
    code = f"import sys\n{statement}\nsys.stdout.write(' '.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    ).stdout.split()
    assert "offbeat" in loaded
    assert set(absent) & set(loaded) == set()

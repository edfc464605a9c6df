"""What the README and the pages of docs/ tell a reader to type does what they say.

A page is one session in an empty folder, like that of a reader: in their order, blocks of ``sh``
and ``python`` are run, and the files that the page shows are written. A file is shown by a
paragraph that begins with its name in backticks and ends with a colon, and the block after it.
What cannot run here says so in its source: ``<!-- not run: reason -->`` before the block.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from offbeat.config import RunConfig
from offbeat.config.schema import join, paths

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
]
SLOW = (
    "README.md",
    "docs/chaos.md",
    "docs/checkpoints.md",
    "docs/data-and-rewards.md",
    "docs/evaluation.md",
    "docs/extending.md",
    "docs/first-steps.md",
    "docs/looking.md",
    "docs/modes.md",
    "docs/replay.md",
    "docs/serving.md",
)
"""Pages whose session takes more than ten seconds."""

RUN = ("sh", "python")
NOT_RUN = re.compile(r"<!-- not run: (.{10,}) -->\s*")
FILE_NAME = re.compile(r"[\w./-]+\.[a-z]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One code block of a page. ``file``: the file that it shows. ``excuse``: why it is not run."""

    language: str
    body: str
    line: int
    file: str | None
    excuse: str | None


def blocks(page: str) -> list[Block]:
    """The code blocks of a page, in order."""
    tokens = MarkdownIt("commonmark").parse((ROOT / page).read_text("utf-8"))
    return [
        Block(
            language=token.info.strip(),
            body=token.content,
            line=token.map[0] + 1,
            file=_file(tokens[max(0, i - 3) : i]),
            excuse=_excuse(tokens[i - 1]),
        )
        for i, token in enumerate(tokens)
        if token.type == "fence" and token.map is not None
    ]


def _file(before: list[Token]) -> str | None:
    """The name with which the paragraph before a block introduces it as a file."""
    if [token.type for token in before] != ["paragraph_open", "inline", "paragraph_close"]:
        return None
    first = (before[1].children or [before[1]])[0]
    introduces = first.type == "code_inline" and before[1].content.endswith(":")
    return first.content if introduces and FILE_NAME.fullmatch(first.content) else None


def _excuse(before: Token) -> str | None:
    found = NOT_RUN.fullmatch(before.content) if before.type == "html_block" else None
    return found and found[1]


def session(page: str) -> str:
    """The page as one shell script, which stops at the first thing that fails."""
    lines = ["set -euo pipefail", f"""trap 'echo "{page}, line $line: failed" >&2' ERR"""]
    for block in blocks(page):
        lines.append(f"line={block.line}")
        if block.file is not None:
            lines += [f"mkdir -p $(dirname {block.file})", _fed(f"cat > {block.file}", block.body)]
        elif block.excuse is None and block.language in RUN:
            lines.append(block.body if block.language == "sh" else _fed("python -", block.body))
    return "\n".join(lines)


def _fed(command: str, body: str) -> str:
    return f"{command} <<'END OF BLOCK'\n{body}END OF BLOCK"


def runnable(page: str) -> bool:
    return any(b.language in RUN and not b.excuse and not b.file for b in blocks(page))


SESSIONS = [
    pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page
    for page in filter(runnable, PAGES)
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", SESSIONS)
def test_page_can_be_followed_from_its_first_block_to_its_last(page: str, tmp_path: Path) -> None:
    for folder in ("recipes", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    script = tmp_path / "session.sh"
    script.write_text(session(page), "utf-8")
    log = tmp_path / "session.log"
    with log.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", script.name],
            cwd=tmp_path,
            env=environment(tmp_path),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = shell.wait(280)
        finally:
            with suppress(ProcessLookupError):  # servers that the page left running
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    assert code == 0, log.read_text("utf-8", "replace")[-4000:]


def environment(home: Path) -> Mapping[str, str]:
    """That of a reader who has activated the virtual environment, and has no network."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_a_file_or_output_or_says_why_not(page: str) -> None:
    known = (*RUN, "text", "yaml", "json")
    assert [f"line {b.line}" for b in blocks(page) if not b.file and b.language not in known] == []
    excused = [f"line {b.line}" for b in blocks(page) if b.excuse and b.language not in RUN]
    assert excused == [], "only commands need an excuse"


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_shows_can_be_parsed(page: str) -> None:
    for block in blocks(page):
        if block.language == "json":
            for row in block.body.splitlines() if "}\n{" in block.body else [block.body]:
                json.loads(row)
        elif block.language == "python":
            compile(block.body, f"{page}:{block.line}", "exec")


def keys(found: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a configuration, without those below a key of free content."""
    for key, value in found.items():
        path = join(prefix, key)
        yield path
        if isinstance(value, Mapping) and any(k.startswith(f"{path}.") for k in KEYS):
            yield from keys(value, path)


KEYS = frozenset(paths(RunConfig))


@pytest.mark.parametrize("page", PAGES)
def test_every_configuration_shown_has_known_keys(page: str) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            unknown = set(keys(yaml.safe_load(block.body))) - KEYS
            assert not unknown, f"{page}, line {block.line}"

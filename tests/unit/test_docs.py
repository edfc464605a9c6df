"""The documents say what is true: links, folders, commands, keys, and the README's first run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import offbeat
from offbeat.cli import INTERRUPTED, TERMINATED, app
from offbeat.config import RunConfig, RunMode, load
from offbeat.config.presets import MODE_PRESETS
from offbeat.config.schema import Section, paths, section_of, specs
from offbeat.observe.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "offbeat"
DOCUMENTS = tuple(
    sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=lambda path: path.as_posix())
)
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
README = (ROOT / "README.md").read_text("utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED_BLOCK = re.compile(
    r"^`([\w./-]+\.[a-z]+)`(?:(?!\n\n).)*:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
MIGRATION = "docs/migrating-"
RUN_FOLDERS = ("runs", "models", "rollouts", "checkpoints", "snapshots", "logs")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")


def section_at(key: str) -> type[Section] | None:
    """The section that a dotted key of the configuration holds; None for a key with a value."""
    cls: type[Section] | None = RunConfig
    for name in key.split("."):
        assert cls is not None
        cls = section_of(next(spec.hint for spec in specs(cls) if spec.name == name))
    return cls


def prose(path: Path) -> str:
    """The text of a document without its code blocks."""
    return BLOCK.sub("", path.read_text("utf-8"))


def anchors(path: Path) -> set[str]:
    """The names under which GitHub links to the headings of a document."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in kept}


def shell_lines(language: str = "sh") -> list[str]:
    """The commands of the README's shell blocks, without comments."""
    bodies = [body.replace("\\\n", " ") for kind, body in BLOCK.findall(README) if kind == language]
    lines = [shlex.join(shlex.split(x, comments=True)) for b in bodies for x in b.splitlines()]
    return [line for line in lines if line]


COMMANDS = [line for line in shell_lines() if line.startswith("offbeat ")]


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading or a header row, header left out."""
    _, found, rest = text.partition(heading)
    assert found, heading
    lines = rest.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| ---"))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def code(cell: str) -> list[str]:
    """What stands in backticks in a cell."""
    return CODE.findall(cell)


# Links, files, folders


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name: str) -> None:
    path = ROOT / name
    for target in LINK.findall(prose(path)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{name} links to {target}"


@pytest.mark.parametrize("name", NAMES)
def test_every_module_and_recipe_named_exists(name: str) -> None:
    shown = {word for word, _ in NAMED_BLOCK.findall((ROOT / name).read_text("utf-8"))}
    for word in CODE.findall(prose(ROOT / name)):
        if re.fullmatch(r"(?:[\w.]+/)*[\w.]+\.(?:py|yaml|md)|(?:[\w.]+/)+", word):
            made = word.split("/")[0] in RUN_FOLDERS
            of_a_run = word in ("config.yaml", "sums.yaml", "sums.py", "utils.py")
            found = any((base / word).exists() for base in (ROOT, PACKAGE))
            assert found or made or of_a_run or word in shown, f"{name} names {word}"


def test_every_folder_of_the_map_exists_and_every_room_is_on_it() -> None:
    named = {folder for row in table(README, "## Map") for folder in code(row[0])}
    assert [folder for folder in named if not (ROOT / folder).is_dir()] == []
    rooms = {f"src/offbeat/{p.parent.name}/" for p in PACKAGE.glob("*/__init__.py")}
    assert rooms - named == set()


def rows_of_rooms(text: str) -> list[tuple[str, str]]:
    """(room, row) of each room in the table of the import rule."""
    rows = [(row[0], re.sub(r"\(.*?\)", "", row[1])) for row in table(text, "import rule\n")]
    return sorted((room, number) for number, cell in rows for room in code(cell))


def test_every_room_stands_in_one_row_the_same_in_both_documents() -> None:
    rooms = {f"{p.parent.name}/" for p in PACKAGE.glob("*/__init__.py")}
    modules = {p.name for p in PACKAGE.glob("*.py")} - {"__init__.py"}
    rows = rows_of_rooms(ARCHITECTURE)
    assert [room for room, _ in rows] == sorted(rooms | modules)
    assert rows == rows_of_rooms((ROOT / "AGENTS.md").read_text("utf-8"))


def test_agents_fits_on_one_hundred_lines() -> None:
    assert len((ROOT / "AGENTS.md").read_text("utf-8").splitlines()) <= 100


def test_every_recipe_is_in_the_readme_and_every_one_there_exists() -> None:
    named = {word for row in table(README, "## Recipes") for word in LINK.findall(row[0])}
    assert named == {p.relative_to(ROOT).as_posix() for p in ROOT.glob("recipes/*.yaml")}


def test_license_is_the_one_that_the_package_declares() -> None:
    first = (ROOT / "LICENSE").read_text("utf-8").split()[:4]
    assert first == ["Apache", "License", "Version", "2.0,"]
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text("utf-8")


def test_changelog_knows_the_version_of_the_package() -> None:
    assert f"## [{offbeat.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_every_message_that_troubleshooting_lists_can_be_given() -> None:
    code_of_all = "".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    said = re.sub(r'"\s*\n\s*f?"', "", code_of_all)  # strings that continue on the next line
    listed = table((ROOT / "docs/troubleshooting.md").read_text("utf-8"), "the message has")
    for message, _ in listed:
        assert all(part in said for part in message.strip("`").split(" …")), message


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of docs/ as HTML; a warning fails it: a page nobody links to, a dead anchor, …"""
    out = tmp_path_factory.mktemp("site")
    builder = ("-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "--fresh-env")
    done = subprocess.run(
        [sys.executable, *builder, "-d", out / "trees", ROOT / "docs", out / "html"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


def test_site_has_every_page(site: Path) -> None:
    pages = {p.relative_to(ROOT / "docs").with_suffix(".html") for p in ROOT.glob("docs/**/*.md")}
    assert {page for page in pages if not (site / page).is_file()} == set()


def test_configuration_reference_has_every_key(site: Path) -> None:
    html = (site / "configuration.html").read_text("utf-8")
    leaves = {key for key in paths(RunConfig) if section_at(key) is None}
    assert {key for key in leaves if f'id="confval-{key}"' not in html} == set()


def test_command_reference_has_every_command_and_option(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "commands.html").read_text("utf-8"))
    for verb, command in commands():
        assert f"offbeat {verb}" in text
        options = {name for p in command.params for name in p.opts if name.startswith("--")}
        assert {name for name in options if name not in text} == set(), verb


def test_links_out_of_the_folder_are_names_in_the_site(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert "../tests" not in page.read_text("utf-8"), page.name
    assert "tests/unit/test_imports.py" in (site / "architecture.html").read_text("utf-8")


# Keys and metrics


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_key_named_exists(name: str) -> None:
    known = set(paths(RunConfig))
    sections = {path.partition(".")[0] for path in known if "." in path}
    # The first column of the migration tables has another project's keys.
    text = re.sub(
        r"^\|[^|]*", "", prose(ROOT / name), flags=re.MULTILINE if MIGRATION in name else 0
    )
    for word in CODE.findall(text):
        for key in re.findall(r"(?<![\w/.])([a-z_]+\.[a-z_.]+)(?=[:=\s]|$)", word):
            module = key.endswith((".py", ".yaml", ".json", ".jsonl", ".db"))
            if key.partition(".")[0] in sections and not module:
                assert key in known, f"{name} names the key {key}"


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_named_is_declared(name: str) -> None:
    areas = {metric.partition("/")[0] for metric in METRICS}
    for word in CODE.findall(prose(ROOT / name)):
        if re.fullmatch(r"[a-z]+/[a-z0-9_]+", word) and word.partition("/")[0] in areas:
            assert word in METRICS, f"{name} names the metric {word}"


def test_table_of_modes_is_the_preset() -> None:
    def plain(value: object) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    wanted = [
        [f"`{section}.{key}`", *(plain(MODE_PRESETS[mode][section][key]) for mode in RunMode)]
        for section, keys in MODE_PRESETS[RunMode.SYNC].items()
        for key in keys
    ]
    assert table(README, "## On the beat or off it") == wanted


# Commands


def parse(line: str) -> str:
    """Parse a command line without running it; returns its verb."""
    command = typer.main.get_command(app)
    words, verb = shlex.split(line)[1:], []
    while hasattr(command, "commands"):
        verb.append(words.pop(0))
        assert verb[-1] in command.commands, f"{line}: no command {verb[-1]}"
        command = command.commands[verb[-1]]
    command.make_context(" ".join(verb), words)
    return " ".join(verb)


def commands() -> Iterator[tuple[str, Any]]:
    """Each command with the words that call it."""
    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        below = getattr(command, "commands", None)
        if below is None:
            yield name, command
        else:
            yield from ((f"{name} {word}", leaf) for word, leaf in below.items())


def verbs() -> set[str]:
    return {verb for verb, _ in commands()}


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_readme_is_accepted(line: str) -> None:
    assert parse(line) in verbs()


@pytest.mark.parametrize("line", [c for c in COMMANDS if "recipes/" in c])
def test_every_configuration_of_the_readme_loads(line: str) -> None:
    words = shlex.split(line)
    file = next(word for word in words if word.endswith(".yaml"))
    overrides = [word for word in words if re.match(r"[\w.]+=", word)]
    assert load(ROOT / file, overrides).given


def test_table_of_commands_has_every_verb() -> None:
    shown = [code(row[0])[0] for row in table(README, "## Commands")]
    named = {re.split(r" (?=[A-Z\[])", line, maxsplit=1)[0] for line in shown}
    assert named == {f"offbeat {verb}" for verb in verbs()}


def test_options_of_the_table_of_commands_exist() -> None:
    for command, what in table(README, "## Commands"):
        verb = re.split(r" (?=[A-Z\[])", code(command)[0], maxsplit=1)[0].split()[1:]
        found = typer.main.get_command(app)
        for name in verb:
            assert hasattr(found, "commands")
            found = found.commands[name]
        known = {option for parameter in found.params for option in parameter.opts}
        wanted = {word.split()[0] for word in code(what) if word.startswith("--")}
        assert wanted <= known, command


def offbeat_command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "offbeat", *args],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_exit_code_of_a_mistake_is_the_documented_one(tmp_path: Path) -> None:
    codes = {row[0]: row[1] for row in table(README, "Exit codes:")}
    assert set(codes) == {"0", "1", "2", str(INTERRUPTED), str(TERMINATED)}
    done = offbeat_command("train", "nowhere.yaml", cwd=tmp_path)
    assert "configuration" in codes[str(done.returncode)], done.stderr


def first_run(folder: Path) -> list[str]:
    """Write the README's own files into ``folder``; returns the commands that follow them."""
    _, _, section = README.partition("## A first run of your own")
    section = section.partition("\n## ")[0]
    files = dict(NAMED_BLOCK.findall(section))
    assert set(files) == {"sums.jsonl", "sums.py", "sums.yaml"}
    for name, body in files.items():
        (folder / name).write_text(body, "utf-8")
    assert len(files["sums.yaml"].splitlines()) <= 15
    assert len(files["sums.py"].splitlines()) <= 8
    blocks = [body for kind, body in BLOCK.findall(section) if kind == "sh"]
    return [line for body in blocks for line in body.splitlines()]


def test_first_run_of_the_readme_passes_its_dry_run(tmp_path: Path) -> None:
    commands = first_run(tmp_path)
    assert commands[-2].removesuffix(" --dry-run") == commands[-1]
    for line in commands[:-1]:
        done = offbeat_command(*shlex.split(line)[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "everything that can be checked without training is fine" in done.stdout
    assert "40 steps of 3 prompts x 32 answers" in done.stdout


def test_python_of_the_readme_uses_what_the_package_offers(tmp_path: Path) -> None:
    first_run(tmp_path)
    body = next(b for kind, b in BLOCK.findall(README) if kind == "python" and "import off" in b)
    compile(body, "README.md", "exec")
    used = set(re.findall(r"\boffbeat\.(\w+)", body))
    assert used
    assert used <= set(offbeat.__all__)
    file, overrides = re.findall(r"load\(\"(.+?)\", \[(.*?)\]\)", body)[0]
    assert load(tmp_path / file, re.findall(r'"(.+?)"', overrides)).total_train_steps == 3
    fields = offbeat.Summary.__dataclass_fields__
    assert set(re.findall(r"\bsummary\.(\w+)", body)) <= set(fields)

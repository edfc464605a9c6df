"""``offbeat runs`` and ``offbeat show``: runs, whether they go on, ended or failed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.arguments import Fileroot, Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.observe.rollouts import RolloutRow
    from offbeat.observe.show import RunReader, RunView

WIDTH = 100
"""Columns of charts where there is no terminal."""

WATCH_SECONDS = 1.0
"""How often a watched run is read."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")]


def runs(fileroot: Fileroot = Path("runs"), as_json: AsJson = False) -> None:
    """List all runs, the newest first."""
    from offbeat.observe import runs as listing
    from offbeat.observe.show import as_json as json_text

    found = listing.list_runs(fileroot)
    if as_json:
        typer.echo(json_text(listing.runs_content(found)))
    elif found:
        _echo(listing.runs_text(found))
    else:
        _echo(f"no run lies below {fileroot}; offbeat train makes one")


def show(
    run: Run,
    as_json: AsJson = False,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Draw this metric in place of the usual ones; may be repeated."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw the curves into this file as well (extra plot).")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Print this many rollouts of --step.")] = 0,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step of the samples; default the newest.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Samples with the highest reward.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Samples with the lowest reward.")] = False,
    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens", help="Samples token by token: log-prob, version, advantage; at least one."
        ),
    ] = False,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="What became of every group and token.")
    ] = False,
    compare: Annotated[
        str | None, typer.Option(metavar="RUN", help="Set this run beside it.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on until the run ends, or Ctrl-C.")
    ] = False,
    fileroot: Fileroot = Path("runs"),
) -> None:
    """Look at a run: running, finished, failed or killed."""
    from offbeat.observe.find import find_run
    from offbeat.observe.series import named
    from offbeat.observe.show import RunReader

    chosen = {"--step": step is not None, "--best": best, "--worst": worst, "--tokens": tokens}
    samples = samples or int(tokens)
    _check_samples(samples, chosen)
    _check_views(
        {"--samples": samples > 0, "--ledger": ledger, "--compare": bool(compare), "--watch": watch}
    )
    if watch:
        _check_views({"--watch": True, "--png": png is not None})
    path = find_run(run, fileroot)
    reader = RunReader(path, named(metric or []))
    if watch:
        _watch(reader, as_json)
        return
    view = reader.read()
    if metric:
        reader.require_curves()
    views = [view]
    if compare is not None:
        views.append(RunReader(find_run(compare, fileroot), named(metric or [])).read())
    if png is not None:
        from offbeat.observe.picture import save_png

        save_png(png, {str(v.path): v.curves for v in views})
    if compare is not None:
        _show_comparison(views, as_json)
    elif ledger:
        _show_ledger(view, as_json)
    else:
        _show_run(view, _samples(path, samples, step, best, worst), tokens, as_json)


def _check_samples(samples: int, chosen: dict[str, bool]) -> None:
    """Refuse options that would have no effect."""
    given = [name for name, is_given in chosen.items() if is_given]
    if given and not samples:
        raise typer.BadParameter(f"{given[0]} chooses among samples; add --samples N")
    if chosen["--best"] and chosen["--worst"]:
        raise typer.BadParameter("--best and --worst exclude each other")


def _check_views(chosen: dict[str, bool]) -> None:
    given = [name for name, is_given in chosen.items() if is_given]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} exclude each other")


def _samples(
    path: Path, count: int, step: int | None, best: bool, worst: bool
) -> tuple[RolloutRow, ...]:
    if not count:
        return ()
    from offbeat.observe.samples import Choice, read_samples

    choice = Choice.BEST if best else Choice.WORST if worst else Choice.SPREAD
    return read_samples(path, count, step, choice)


def _show_run(view: RunView, rows: Sequence[RolloutRow], tokens: bool, as_json: bool) -> None:
    from offbeat.observe import show as text

    if as_json:
        content = text.run_content(view)
        if rows:
            content["samples"] = _samples_content(view.path, rows, tokens)
        typer.echo(text.as_json(content))
        return
    if rows:
        head = "\n".join(text.summary_lines(view)[:2])
        _echo(f"{head}\n\n{_samples_page(view.path, rows, tokens)}")
    else:
        _echo(_run_page(view))


def _run_page(view: RunView) -> str:
    """Numbers, charts and conclusion."""
    from offbeat.observe import show as text
    from offbeat.observe.curves import charts

    drawn = charts([view.curves], width=_width(), utf8=_is_utf8())
    blocks = [text.summary_lines(view), drawn, text.conclusion_lines(view)]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _samples_page(path: Path, rows: Sequence[RolloutRow], tokens: bool) -> str:
    from offbeat.observe.samples import samples_text

    if not tokens:
        return samples_text(rows)
    from offbeat.observe.vocabulary import token_texts

    text, problem = token_texts(path)
    page = samples_text(rows, token_text=text)
    return page if problem is None else f"{page}\n\n{problem}"


def _samples_content(
    path: Path, rows: Sequence[RolloutRow], tokens: bool
) -> list[dict[str, object]]:
    from offbeat.observe.samples import sample_content
    from offbeat.observe.vocabulary import token_texts

    text = token_texts(path)[0] if tokens else None
    return [sample_content(row, text) for row in rows]


def _show_ledger(view: RunView, as_json: bool) -> None:
    from offbeat.observe import fates
    from offbeat.observe.resuming import resumption
    from offbeat.observe.show import as_json as json_text

    found = fates.read_fates(view.path)
    if as_json:
        typer.echo(json_text({"run": str(view.path), **fates.fates_content(found)}))
        return
    ended = resumption(view.path, view.summary.status)
    _echo(f"run {view.path}\n\n{fates.fates_text(found, ended=ended)}")


def _show_comparison(views: Sequence[RunView], as_json: bool) -> None:
    from offbeat.observe import compare
    from offbeat.observe.show import as_json as json_text

    if as_json:
        typer.echo(json_text(compare.comparison_content(views)))
    else:
        _echo(compare.comparison_text(views, width=_width(), utf8=_is_utf8()))


def _watch(reader: RunReader, as_json: bool) -> None:
    """Follow a run until it ends: redrawn in a terminal, a line per step elsewhere.

    Ctrl-C ends the watching, not the run.
    """
    try:
        if as_json:
            _watch_lines(reader, as_json=True)
        elif sys.stdout.isatty():
            _watch_screen(reader)
        else:
            _watch_lines(reader, as_json=False)
    except KeyboardInterrupt:
        typer.echo("no longer watching; the run goes on", err=True)


def _watch_screen(reader: RunReader) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            view = reader.read()
            live.update(Text(_fitting_page(view, console.height)), refresh=True)
            if not _goes_on(view):
                break
            _pause()


def _fitting_page(view: RunView, height: int) -> str:
    """The page with charts, or with curves of one line each where that is too high."""
    from offbeat.observe.show import run_text

    page = _run_page(view)
    return page if page.count("\n") < height else run_text(view)


def _watch_lines(reader: RunReader, *, as_json: bool) -> None:
    """The newest step, then each new one; at the end the run."""
    from offbeat.observe import show as text
    from offbeat.observe.console import step_line

    while True:
        view = reader.read()
        for record in view.new:
            flat = record.flat()
            line = {"step": record.step, **flat}
            typer.echo(text.as_json(line, indent=-1) if as_json else step_line(record.step, flat))
        if not _goes_on(view):
            break
        _pause()
    if as_json:
        typer.echo(text.as_json(text.run_content(view), indent=-1))
    else:
        _echo("\n" + text.run_text(view))


def _goes_on(view: RunView) -> bool:
    from offbeat.observe.summary import RunStatus

    return view.summary.status in (RunStatus.RUNNING, RunStatus.UNFINISHED)


def _pause() -> None:
    import time

    time.sleep(WATCH_SECONDS)


def _width() -> int:
    import shutil

    return shutil.get_terminal_size((WIDTH, 24)).columns


def _is_utf8() -> bool:
    from offbeat.observe.terminal import is_utf8

    return is_utf8(sys.stdout.encoding or "ascii")


def _echo(text: str) -> None:
    """Print ``text`` as far as the standard output can take it."""
    from offbeat.observe.terminal import encodable

    typer.echo(encodable(text, sys.stdout.encoding or "ascii"))

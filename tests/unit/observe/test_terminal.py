"""Claims about text that any terminal can show."""

import pytest

from offbeat.observe.terminal import encodable, harmless, is_utf8, sparkline, table


def test_sparkline_is_flat_for_equal_values_and_never_wider_than_asked() -> None:
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([0.0, 7.0]) == "▁█"
    assert len(sparkline([float(i % 17) for i in range(1000)], width=30)) == 30
    assert sparkline([float(i) for i in range(80)], width=8) == "▁▂▃▄▅▆▇█"


def test_harmless_escapes_control_characters_only() -> None:
    assert harmless("é✓\n\t\x1b\u202e") == "é✓\n\\t\\x1b\\u202e"


@pytest.mark.parametrize(("encoding", "utf8"), [("UTF-8", True), ("utf8", True), ("ascii", False)])
def test_bars_and_frames_have_likenesses_where_there_is_no_utf8(encoding: str, utf8: bool) -> None:
    text = "┌─┐ ▁█ é"
    assert is_utf8(encoding) is utf8
    assert encodable(text, encoding) == (text if utf8 else "+-+ .# \\xe9")


def test_columns_are_aligned_by_what_a_terminal_shows() -> None:
    assert table(("run", "steps"), [("日本", "7"), ("b", "1234")]) == [
        "run   steps",
        "日本      7",
        "b      1234",
    ]


def test_table_without_rows_is_its_title() -> None:
    assert table(("run", "steps"), []) == ["run  steps"]

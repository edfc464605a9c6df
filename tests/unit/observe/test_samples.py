"""Claims about rollouts as a person reads them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from offbeat.errors import DataError
from offbeat.observe.samples import Choice, read_samples, sample_content, samples_text
from offbeat.observe.vocabulary import token_texts

LogRollouts = Callable[[Path], None]


@pytest.fixture
def logged(tmp_path: Path, log_rollouts: LogRollouts) -> Path:
    log_rollouts(tmp_path)
    return tmp_path


def test_samples_show_prompt_answer_reward_and_versions_and_cannot_touch_the_terminal(
    logged: Path,
) -> None:
    rows = read_samples(logged, 2)
    assert [r.sibling for r in rows] == [0, 2]
    text = samples_text(read_samples(logged, 99))
    assert "group 5.0  reward 1.000 (correct 1)  advantage +1.250" in text
    assert "group 5.3  reward invalid (timeout)  advantage -" in text
    assert "stop length  3 tokens  versions 2, 3 (admitted at 2)" in text
    assert "  prompt | 2+2=" in text
    assert "  answer | \\x1b[2Jfirst\n         | second" in text
    assert "\x1b" not in text
    sample = sample_content(rows[0])
    assert (sample["reward"], sample["versions"], sample["stop_reason"]) == (1.0, [2, 3], "length")
    assert "tokens" not in sample


@pytest.mark.parametrize(
    ("choice", "siblings"),
    [(Choice.BEST, [0, 1, 2, 3]), (Choice.WORST, [2, 1, 0, 3]), (Choice.SPREAD, [0, 1, 2, 3])],
)
def test_best_and_worst_are_by_reward_and_those_without_one_come_last(
    logged: Path, choice: Choice, siblings: list[int]
) -> None:
    assert [r.sibling for r in read_samples(logged, 4, choice=choice)] == siblings
    assert [r.sibling for r in read_samples(logged, 1, choice=choice)] == siblings[:1]


def test_long_text_is_cut_and_says_so(logged: Path) -> None:
    text = samples_text(read_samples(logged, 1), limit=6)
    assert "[10 more characters]" in text
    assert "second" not in text


def test_samples_of_a_run_without_rollouts_are_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none are recorded"):
        read_samples(tmp_path, 3)


def test_token_table_has_a_line_per_token_with_its_own_version(logged: Path) -> None:
    (row,) = read_samples(logged, 1)
    lines = samples_text([row], token_text=lambda token: f"<{token}\n>").splitlines()
    head = next(i for i, line in enumerate(lines) if "log-prob" in line)
    assert [line.split() for line in lines[head + 1 :]] == [
        ["0", "7", "'<7\\n>'", "-0.500", "2", "+1.250"],
        ["1", "8", "'<8\\n>'", "-1.000", "2", "+1.250"],
        ["2", "9", "'<9\\n>'", "-2.000", "3", "+1.250"],
    ]
    assert sample_content(row, str)["tokens"] == [
        {"id": t, "text": str(t), "logprob": logp, "version": v, "advantage": 1.25}
        for t, logp, v in ((7, -0.5, 2), (8, -1.0, 2), (9, -2.0, 3))
    ]


def save_tokenizer(folder: Path) -> None:
    folder.mkdir()
    Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("where", ["here", "config_dir"])
def test_token_texts_come_from_the_model_folder_seen_from_here_or_from_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    save_tokenizer(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(f"model: {{path: model}}\nconfig_dir: {tmp_path}\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path if where == "here" else tmp_path / "elsewhere")
    text, problem = token_texts(tmp_path)
    assert (text(0), text(7), problem) == ("a", "7", None)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "config.yaml"),
        ("seed: 1\n", "names no model.path"),
        ("model: {path: gone}\n", "no tokenizer.json in gone"),
        ("model: {path: broken}\n", "reading broken/tokenizer.json"),
    ],
)
def test_where_there_is_no_tokenizer_ids_stand_for_texts_and_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
    text, problem = token_texts(tmp_path)
    assert text(7) == "7"
    assert problem is not None
    assert said in problem

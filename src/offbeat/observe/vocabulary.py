"""The text of single tokens, from the tokenizer of the model that a run trains.

Reads ``config.yaml`` and ``tokenizer.json``; loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from offbeat.errors import ConfigError, DataError, boundary
from offbeat.observe.find import CONFIG_FILE
from offbeat.observe.recorded import recorded_config

_INCOMPLETE = "�"


def token_texts(run_dir: Path) -> tuple[Callable[[int], str], str | None]:
    """A function from token id to text, and why it gives ids only, if so.

    ``model.path`` is looked for from here, then from ``config_dir``.
    """
    try:
        tokenizer = _tokenizer(run_dir)
    except (ConfigError, DataError) as exc:
        return str, f"token texts are not known: {exc}"

    def text(token: int) -> str:
        name: str | None = tokenizer.id_to_token(token)
        if name is None:
            return str(token)
        shown: str = tokenizer.decode([token], skip_special_tokens=False)
        # A part of a character has no text of its own; its name in the vocabulary says more.
        return name if _INCOMPLETE in shown else shown

    return text, None


def _tokenizer(run_dir: Path) -> Tokenizer:
    config = recorded_config(run_dir)
    path = config.get("model.path")
    if not isinstance(path, str):
        raise DataError(f"{run_dir / CONFIG_FILE} names no model.path")
    folders = [Path(path).expanduser(), Path(str(config.get("config_dir") or ".")) / path]
    file = next((f for d in folders if (f := d / "tokenizer.json").is_file()), None)
    if file is None:
        raise DataError(f"there is no tokenizer.json in {' nor '.join(map(str, folders))}")
    with boundary(DataError, f"reading {file}"):
        return Tokenizer.from_file(str(file))

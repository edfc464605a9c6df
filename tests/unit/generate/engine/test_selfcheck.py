"""The start-up comparison sees a difference where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from offbeat.generate.engine.engine import Engine
from offbeat.generate.engine.selfcheck import compare_paths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakeEngine = Callable[..., Engine]


@pytest.mark.parametrize("max_len", [512, 40, 12, 5, 2])
def test_both_paths_agree_here_whatever_the_context(
    loaded: PreTrainedModel, make_engine: MakeEngine, max_len: int
) -> None:
    found = compare_paths(loaded, make_engine(max_len=max_len), max_len=max_len)
    assert (found.bitwise, found.max_error) == (True, 0.0)


def test_an_engine_over_other_weights_is_told_apart(
    loaded: PreTrainedModel, model: PreTrainedModel, make_engine: MakeEngine
) -> None:
    with torch.no_grad():
        model.get_output_embeddings().weight[7].mul_(1.01)
    found = compare_paths(loaded, make_engine(model=model), max_len=512)
    assert not found.bitwise
    assert found.max_error > 1e-5

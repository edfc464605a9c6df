"""Reward functions to use as they are: ``rollout.reward_fn: offbeat.rewards:exact_match``.

Each takes the answer's text and the row's columns, gives 0.0 ... 1.0 (``length_penalty``: down to
-1.0), and can be called from a reward function of your own. Options go into ``args``::

    reward_fn:
      - {fn: "offbeat.rewards:numeric_match", args: {relative: 0.01}}
      - {fn: "offbeat.rewards:regex_format", weight: 0.2, args: {pattern: "<think>.*</think>.*"}}
"""

from __future__ import annotations

from offbeat.rewards.format import json_format, regex_format
from offbeat.rewards.length import length_limit, length_penalty
from offbeat.rewards.match import exact_match, numeric_match
from offbeat.rewards.symbolic import math_verify

__all__ = [
    "exact_match",
    "json_format",
    "length_limit",
    "length_penalty",
    "math_verify",
    "numeric_match",
    "regex_format",
]

"""Rows of a micro-batch as one packed row for the model: what is computed, and where answers lie.

Owns the step from ``TrainBatch`` rows to segments. Tokens that siblings share are one segment that
the rest of each sibling continues; nothing is computed that no policy token is predicted from.
Knows no loss and no model.

Shapes: P policy tokens, N packed tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offbeat.model.attention import PackedLayout
from offbeat.train.batch import TrainBatch
from offbeat.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """``tokens`` [N] int64 as ``layout`` places them; per policy token, [P] int64: ``states``, the
    packed token that predicts it, and ``targets``, its id.
    """

    layout: PackedLayout
    tokens: Tensor
    states: Tensor
    targets: Tensor

    @classmethod
    def build(cls, rows: TrainBatch) -> PackedRows:
        """Pack ``rows``, of which at least one has a policy token."""
        segments = _Segments()
        for tokens, targets, group, shared in zip(
            rows.tokens, rows.targets, rows.groups.tolist(), rows.shared.tolist(), strict=True
        ):
            if len(targets):
                segments.add(tokens, targets, group, shared)
        device = rows.seq_id.device
        lengths = [len(t) for t in segments.tokens]
        layout = PackedLayout.build(lengths, parents=segments.parents, device=device)
        # A state is a segment and a place in it.
        states = np.take(layout.starts, np.concatenate(segments.state_segments))
        states += np.concatenate(segments.state_places)
        targets = np.concatenate([t[at] for t, at in zip(rows.tokens, rows.targets, strict=True)])
        return cls(
            layout=layout,
            tokens=layout.pack(segments.tokens),
            states=torch.from_numpy(states).to(device),
            targets=torch.from_numpy(targets).to(device),
        )


class _Segments:
    """Segments in the order they are laid out, and of each policy token the state before it."""

    def __init__(self) -> None:
        self.tokens: list[IntArray] = []
        self.parents: list[int | None] = []
        self.state_segments: list[IntArray] = []
        self.state_places: list[IntArray] = []
        self._prefixes: dict[int, int] = {}

    def add(self, tokens: IntArray, targets: IntArray, group: int, shared: int) -> None:
        """One row: the group's prefix once, then what the row has beyond it."""
        before, end = targets - 1, int(targets[-1])
        in_prefix = before < shared
        prefix = self._prefix(group, tokens[:shared]) if shared else None
        # A row may end with the prefix: then it has no segment of its own.
        own = self._segment(tokens[shared:end], prefix) if end > shared else -1
        self.state_segments.append(np.where(in_prefix, -1 if prefix is None else prefix, own))
        self.state_places.append(np.where(in_prefix, before, before - shared))

    def _prefix(self, group: int, tokens: IntArray) -> int:
        if group not in self._prefixes:
            self._prefixes[group] = self._segment(tokens, None)
        return self._prefixes[group]

    def _segment(self, tokens: IntArray, parent: int | None) -> int:
        self.tokens.append(tokens)
        self.parents.append(parent)
        return len(self.tokens) - 1

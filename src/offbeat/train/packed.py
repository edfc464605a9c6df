"""Rows of a micro-batch as one packed row for the model: what is computed, and where answers lie.

Owns the step from ``TrainBatch`` rows to segments. Tokens that siblings share are one segment that
the rest of each sibling continues; nothing is computed that no policy token is predicted from.
Knows no loss and no model.

Shapes: P policy tokens, N packed tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.model.attention import PackedLayout
from offbeat.train.batch import TrainBatch


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
        for row in range(rows.rows):
            segments.add(
                rows.tokens[row],
                rows.targets[row],
                group=int(rows.group_ids[row]),
                shared=int(rows.shared[row]),
            )
        device = rows.behave_logp.device
        lengths = [len(t) for t in segments.tokens]
        layout = PackedLayout.build(lengths, parents=segments.parents, device=device)
        # A state is (segment, place in it).
        begins = torch.tensor(layout.starts, device=device)
        return cls(
            layout=layout,
            tokens=layout.pack(segments.tokens),
            states=begins[torch.cat(segments.state_segment)] + torch.cat(segments.state_place),
            targets=torch.cat([t[at] for t, at in zip(rows.tokens, rows.targets, strict=True)]),
        )


class _Segments:
    """Segments in the order they are laid out, and of each policy token the state before it."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.parents: list[int | None] = []
        self.state_segment: list[Tensor] = []
        self.state_place: list[Tensor] = []
        self._prefixes: dict[int, int] = {}

    def add(self, tokens: Tensor, targets: Tensor, *, group: int, shared: int) -> None:
        """One row: the group's prefix once, then what the row has beyond it."""
        if not len(targets):
            return
        before = targets - 1
        end = int(targets[-1])
        in_prefix = before < shared
        prefix = self._prefix(group, tokens[:shared]) if shared else None
        segment = torch.full_like(before, -1 if prefix is None else prefix)
        # A row may end with the prefix: then it has no segment of its own.
        if end > shared:
            segment[~in_prefix] = self._segment(tokens[shared:end], prefix)
        self.state_segment.append(segment)
        self.state_place.append(torch.where(in_prefix, before, before - shared))

    def _prefix(self, group: int, tokens: Tensor) -> int:
        if group not in self._prefixes:
            self._prefixes[group] = self._segment(tokens, None)
        return self._prefixes[group]

    def _segment(self, tokens: Tensor, parent: int | None) -> int:
        self.tokens.append(tokens)
        self.parents.append(parent)
        return len(self.tokens) - 1

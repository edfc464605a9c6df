"""A step's samples as tensors: rows of tokens, and everything per policy token in flat arrays.

Consumes ``TrainSample``s; produces ``TrainBatch``. Only tokens that the policy wrote carry a loss,
so behavior log-probs, versions and masks exist for them alone: P policy tokens in row order,
``seq_id`` names the row of each.

Shapes: R rows, P policy tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import TrainingError
from offbeat.types import GroupId, IntArray, TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Rows of one step, or a selection of them.

    On the host, for packing: ``tokens``: R arrays [T_r]; ``targets``: R arrays, places of the
    policy's tokens in their row, each ≥ 1; ``groups`` [R]: group ids; ``shared`` [R]: leading
    tokens that the model reads in every row of the group, so that one forward pass can compute them
    once (0 where that is off).

    On the device, per policy token, [P]: ``behave_logp`` float32 nats, ``versions`` int64,
    ``seq_id`` int64 in 0..R-1. Per row, [R]: ``row_tokens`` int64 policy tokens, ``rewards``
    float32, ``truncated`` bool, ``group_ids`` int64.
    """

    tokens: tuple[IntArray, ...]
    targets: tuple[IntArray, ...]
    groups: IntArray
    shared: IntArray
    behave_logp: Tensor
    versions: Tensor
    seq_id: Tensor
    row_tokens: Tensor
    rewards: Tensor
    truncated: Tensor
    group_ids: Tensor

    @classmethod
    def build(
        cls, samples: Sequence[TrainSample], device: torch.device, *, share_prefixes: bool = True
    ) -> TrainBatch:
        """Convert samples; raises TrainingError when there is no policy token to train on."""
        if not any(s.loss_mask.any() for s in samples):
            raise TrainingError(
                f"the batch of {len(samples)} rollouts has no token written by the policy: every "
                "answer is empty"
            )
        if any(s.loss_mask[0] for s in samples):
            raise TrainingError(
                "a rollout starts with a policy token: there is nothing to predict it from"
            )
        masks = [s.loss_mask for s in samples]
        targets = tuple(np.flatnonzero(m) for m in masks)
        counts = torch.tensor([len(t) for t in targets], device=device)
        groups = np.array([s.group_id for s in samples], dtype=np.int64)

        def flat(name: str) -> Tensor:
            arrays = [getattr(s, name)[m] for s, m in zip(samples, masks, strict=True)]
            return torch.from_numpy(np.concatenate(arrays)).to(device)

        return cls(
            tokens=tuple(s.tokens for s in samples),
            targets=targets,
            groups=groups,
            shared=_shared_prefixes(samples) if share_prefixes else np.zeros_like(groups),
            behave_logp=flat("behave_logp"),
            versions=flat("versions"),
            seq_id=torch.repeat_interleave(torch.arange(len(samples), device=device), counts),
            row_tokens=counts,
            rewards=torch.tensor([s.reward for s in samples], device=device),
            truncated=torch.tensor([s.truncated for s in samples], device=device),
            group_ids=torch.from_numpy(groups).to(device),
        )

    @property
    def rows(self) -> int:
        """R."""
        return len(self.tokens)

    @property
    def policy_tokens(self) -> int:
        """P."""
        return len(self.seq_id)

    def places(self, rows: Sequence[int]) -> Tensor:
        """Indices into the [P] arrays of the policy tokens of ``rows``, in that order."""
        counts = np.array([len(t) for t in self.targets])
        starts, chosen = np.cumsum(counts) - counts, counts[rows]
        # Each row's own range, one behind the other.
        offset = np.arange(chosen.sum()) - np.repeat(np.cumsum(chosen) - chosen, chosen)
        places = np.repeat(starts[rows], chosen) + offset
        return torch.from_numpy(places).to(self.seq_id.device)

    def select(self, rows: Sequence[int]) -> TrainBatch:
        """The batch of these rows only, in the order given."""
        places = self.places(rows)
        index = torch.tensor(rows, device=places.device)
        counts = self.row_tokens[index]
        return TrainBatch(
            tokens=tuple(self.tokens[r] for r in rows),
            targets=tuple(self.targets[r] for r in rows),
            groups=self.groups[rows],
            shared=self.shared[rows],
            behave_logp=self.behave_logp[places],
            versions=self.versions[places],
            seq_id=torch.repeat_interleave(torch.arange(len(rows), device=places.device), counts),
            row_tokens=counts,
            rewards=self.rewards[index],
            truncated=self.truncated[index],
            group_ids=self.group_ids[index],
        )


def _shared_prefixes(samples: Sequence[TrainSample]) -> IntArray:
    """Per row, the leading tokens it has in common with all rows of its group; 0 when alone.

    A row is read up to the token before its last policy token: nothing is predicted from later
    ones. Rows without a policy token are not read at all.
    """
    read: dict[GroupId, dict[int, IntArray]] = defaultdict(dict)
    for row, sample in enumerate(samples):
        places = np.flatnonzero(sample.loss_mask)
        if len(places):
            read[sample.group_id][row] = sample.tokens[: places[-1]]
    shared = np.zeros(len(samples), dtype=np.int64)
    for rows in read.values():
        if len(rows) > 1:
            shared[list(rows)] = _common_prefix(list(rows.values()))
    return shared


def _common_prefix(rows: Sequence[IntArray]) -> int:
    """Number of leading tokens that all ``rows`` have in common."""
    shortest = min(len(r) for r in rows)
    first = rows[0][:shortest]
    differs = np.any([r[:shortest] != first for r in rows[1:]], axis=0)
    return int(differs.argmax()) if differs.any() else shortest

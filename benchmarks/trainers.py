"""The contenders of ``train_step.py`` and the process each lives in.

Owns the loss both sides compute and how each gets its log-probs. Rows come as JSON; every row is a
prompt and an answer, siblings of a group follow each other.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from measure import Json, peak_rss_mb, reset_peak_rss, rss_mb, serve
from torch import Tensor, nn

if TYPE_CHECKING:
    from offbeat.types import TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rollouts of one step: token ids, one advantage per row, siblings per group."""

    prompts: list[list[int]]
    answers: list[list[int]]
    advantages: list[float]
    siblings: int

    def part(self, start: int, end: int) -> Rows:
        """Rows ``start`` to ``end`` without ``end``."""
        at = slice(start, end)
        return Rows(
            prompts=self.prompts[at],
            answers=self.answers[at],
            advantages=self.advantages[at],
            siblings=self.siblings,
        )

    @property
    def answer_tokens(self) -> int:
        return sum(map(len, self.answers))


class Contender(Protocol):
    """A model that trains; gradients gather in its parameters."""

    model: nn.Module

    def logprobs(self, rows: Rows) -> Tensor:
        """[P] float32 nats of all answer tokens in row order, with a gradient."""

    def parts(self, rows: Rows) -> Sequence[Rows]:
        """``rows`` as the contender wants to compute them, one pass each."""


class Offbeat:
    """The trainer's engine as the trainer process makes it."""

    def __init__(self, model: Path, dtype: str, rows_per_pass: int) -> None:
        from offbeat.config import OptimizerConfig
        from offbeat.model.linear import prepare_for_training, use_onednn
        from offbeat.model.load import load_model
        from offbeat.train.engine import SingleDeviceEngine

        self.model = load_model(str(model), dtype=torch.float32, device=torch.device("cpu"))
        if dtype == "float32" and use_onednn(None, torch.float32, self.model):
            prepare_for_training(self.model)
        self.engine = SingleDeviceEngine(
            self.model,
            compute_dtype=getattr(torch, dtype),
            optimizer=OptimizerConfig(),
            total_steps=1,
        )

    def parts(self, rows: Rows) -> Sequence[Rows]:
        """One pass over packed rows; nothing is padded."""
        return [rows]

    def logprobs(self, rows: Rows) -> Tensor:
        from offbeat.train.batch import TrainBatch

        batch = TrainBatch.build(_samples(rows), self.engine.device)
        return self.engine.logprobs(batch, 1.0)[0]


def _samples(rows: Rows) -> list[TrainSample]:
    """Rows as the trainer gets them from the pipeline."""
    import numpy as np

    from offbeat.types import GroupId, TrainSample

    samples = []
    for i, (prompt, answer) in enumerate(zip(rows.prompts, rows.answers, strict=True)):
        tokens = np.array(prompt + answer, dtype=np.int64)
        mask = np.arange(len(tokens)) >= len(prompt)
        samples.append(
            TrainSample(
                group_id=GroupId(i // rows.siblings),
                sibling=i % rows.siblings,
                tokens=tokens,
                loss_mask=mask,
                behave_logp=np.zeros(len(tokens), dtype=np.float32),
                versions=np.where(mask, 0, -1),
                reward=rows.advantages[i],
                truncated=False,
            )
        )
    return samples


class Transformers:
    """transformers' own forward on a right-padded batch; logits of answers only."""

    def __init__(self, model: Path, dtype: str, rows_per_pass: int) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._autocast = dtype != "float32"
        self._rows_per_pass = rows_per_pass

    def parts(self, rows: Rows) -> Sequence[Rows]:
        """``rows_per_pass`` rows at a time."""
        count = len(rows.answers)
        size = self._rows_per_pass or count
        return [rows.part(i, i + size) for i in range(0, count, size)]

    def logprobs(self, rows: Rows) -> Tensor:
        full = [p + a for p, a in zip(rows.prompts, rows.answers, strict=True)]
        longest = max(map(len, full))
        ids = torch.tensor([r + [0] * (longest - len(r)) for r in full])
        mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in full])
        # From the last token of the shortest prompt on, every row predicts answers.
        first = min(map(len, rows.prompts)) - 1
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._autocast):
            logits = self.model(
                input_ids=ids,
                attention_mask=mask,
                use_cache=False,
                logits_to_keep=longest - first,
            ).logits
        log_p = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        chosen = log_p.gather(2, ids[:, first + 1 :, None]).squeeze(2)
        return torch.cat(
            [
                chosen[i, len(p) - 1 - first : len(p) - 1 - first + len(a)]
                for i, (p, a) in enumerate(zip(rows.prompts, rows.answers, strict=True))
            ]
        )


BUILDERS: dict[str, Callable[[Path, str, int], Contender]] = {
    "offbeat": Offbeat,
    "transformers": Transformers,
}


def grpo_loss(logp: Tensor, rows: Rows, tokens: int) -> Tensor:
    """-Σ A·exp(ℓ - ℓ.detach()) / ``tokens``: GRPO on the policy that sampled, mean over tokens."""
    lengths = torch.tensor([len(a) for a in rows.answers])
    advantage = torch.repeat_interleave(torch.tensor(rows.advantages), lengths)
    return -(advantage * torch.exp(logp - logp.detach())).sum() / tokens


def step(contender: Contender, rows: Rows) -> Tensor:
    """Forward and backward of all rows; returns the log-probs, detached."""
    found = []
    for part in contender.parts(rows):
        logp = contender.logprobs(part)
        grpo_loss(logp, part, rows.answer_tokens).backward()
        found.append(logp.detach())
    return torch.cat(found)


def logprob_memory(tokens: int, vocab: int, hidden: int, dtype: str) -> Json:
    """Memory that log-probs and their backward pass take above what goes in."""
    from offbeat.algo.logprobs import chunked_logprobs

    states = torch.randn(tokens, hidden).to(getattr(torch, dtype)).requires_grad_()
    head = torch.randn(vocab, hidden).mul_(hidden**-0.5).requires_grad_()
    targets = torch.randint(vocab, (tokens,))
    gc.collect()
    reset_peak_rss()
    before, started = rss_mb(), time.perf_counter()
    logp, _ = chunked_logprobs(states, head, None, targets, 1.0)
    forward = peak_rss_mb() - before
    logp.sum().backward()
    return {
        "forward_mb": forward,
        "forward_backward_mb": peak_rss_mb() - before,
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Serve one contender, or the measurement of memory; see ``measure.serve``."""
    parser = argparse.ArgumentParser(description="A worker of train_step.py; not for use by hand.")
    parser.add_argument("name", choices=["memory", *BUILDERS])
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.name == "memory":
        serve({"measure": logprob_memory})
    else:
        _serve_contender(options.name)


def _serve_contender(name: str) -> None:
    loaded: list[Contender] = []

    def load(model: str, dtype: str, rows_per_pass: int) -> Json:
        loaded.append(BUILDERS[name](Path(model), dtype, rows_per_pass))
        gc.collect()
        reset_peak_rss()
        embedding = loaded[0].model.get_input_embeddings()
        return {"vocab": embedding.weight.shape[0]}

    def check(rows: Json) -> Json:
        """Log-probs and the gradient's norm, to compare before anything is timed."""
        logp = step(loaded[0], Rows(**rows))
        grads = [p.grad for p in loaded[0].model.parameters() if p.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads])))
        loaded[0].model.zero_grad(set_to_none=True)
        return {"logp": logp.tolist(), "grad_norm": norm}

    def run(rows: Json) -> Json:
        given = Rows(**rows)
        started = time.perf_counter()
        step(loaded[0], given)
        seconds = time.perf_counter() - started
        loaded[0].model.zero_grad(set_to_none=True)
        return {"seconds": seconds, "peak_rss_mb": peak_rss_mb()}

    serve({"load": load, "check": check, "run": run})


if __name__ == "__main__":
    main()

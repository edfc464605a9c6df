"""The gateway: whether a running run answers questions, and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from offbeat.config.schema import Problem, Range, Section, Text

Port = Annotated[int, Range(ge=0, le=65535)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(Section):
    """OpenAI's protocol in front of the generators, with the live weights, while the run goes on.

    The run is not disturbed: its answers have their own random streams. It is slower, because
    questions take slots and time of the generators.
    """

    port: Port | None = None
    """Where it listens; 0 takes a free port, null is off."""

    host: Text = "127.0.0.1"
    """Address it listens at; one that other machines can reach needs a token."""

    token: Text | None = None
    """What clients must send; null: that of the environment variable ``OFFBEAT_TOKEN``, which does
    not end up in the run's ``config.yaml``, else none.
    """

    def _contradictions(self) -> Iterator[Problem]:
        if self.port is not None:
            return
        for name in sorted({"host", "token"} & self.given):
            yield Problem(
                path=name, text="has no effect without gateway.port; set that or leave this out"
            )

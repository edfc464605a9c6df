"""A reward server in one file: `python server.py`, then POST {"prompt": …, "answer": …} to /score.

Stands for whatever judges your answers: a sandbox that runs code, a reward model, a search.
"""

from __future__ import annotations

import argparse
import asyncio

from aiohttp import web

LATENCY_SECONDS = 0.05
"""As long as a judge might think. Many answers wait at the same time: see `reward.py`."""


def score(prompt: str, answer: str) -> float:
    """One point for a digit that is larger than the one in ``prompt`` ("7<")."""
    return float(answer.isdecimal() and len(answer) == 1 and answer > prompt[0])


async def handle(request: web.Request) -> web.Response:
    """Answer one POST."""
    asked = await request.json()
    await asyncio.sleep(LATENCY_SECONDS)
    return web.json_response({"reward": score(asked["prompt"], asked["answer"])})


def main() -> None:
    """Serve on this machine until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8423)
    app = web.Application()
    app.router.add_post("/score", handle)
    web.run_app(app, host="127.0.0.1", port=parser.parse_args().port)


if __name__ == "__main__":
    main()

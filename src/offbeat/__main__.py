"""``python -m offbeat``."""

from __future__ import annotations

from offbeat.cli import main

main()

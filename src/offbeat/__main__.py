"""``python -m offbeat``."""

from __future__ import annotations

import sys

# Before the package's own imports: on an old Python they would fail one by one, each with a
# traceback. Only pip looks at requires-python, and who runs a checkout does not ask pip.
if sys.version_info < (3, 11):  # noqa: UP036 (that it is outdated is what it says)
    sys.stderr.write(
        "error: offbeat needs Python 3.11 or newer, and {} is {}.{}; make an environment with a "
        "newer one: python3.11 -m venv .venv\n".format(sys.executable, *sys.version_info[:2])
    )
    sys.exit(2)

from offbeat.cli import main

main()

"""How Sphinx builds the site: `make docs`."""

import sys
from pathlib import Path

import offbeat

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "offbeat"
version = release = offbeat.__version__
extensions = ["myst_parser", "offbeat_docs"]
exclude_patterns = ["_ext"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nitpicky = True
smartquotes = False  # -- is part of an option
pygments_style = "friendly"
html_theme = "furo"
html_title = f"offbeat {release}"
html_copy_source = False
html_show_copyright = False

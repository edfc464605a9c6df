"""What the site has beyond its pages: two generated references and links between things.

- A line ``<!-- generated: NAME -->`` becomes the Markdown that the generator NAME makes from code.
- A configuration key in backticks links to its place in the reference.
- A link that leaves ``docs/`` names the file instead: the site has only this folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import command_reference
import configuration_reference
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.typing import ExtensionMetadata

GENERATORS: Mapping[str, Callable[[], str]] = {
    "configuration": configuration_reference.markdown,
    "commands": command_reference.markdown,
}
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
OUTWARD = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s]+)\)")


def fill_in(app: Sphinx, page: str, source: list[str]) -> None:
    """Generate what a page asks for, and name the files outside that it links to."""
    text = MARK.sub(lambda found: GENERATORS[found[1]](), source[0])
    source[0] = OUTWARD.sub(lambda found: _named(page, found[1], found[2]), text)


def _named(page: str, label: str, target: str) -> str:
    """``label (file)``, or the link as it was when it stays inside the site."""
    folder = os.path.dirname(page)
    file = os.path.normpath(os.path.join("docs", folder, target.partition("#")[0]))
    if file.startswith("docs/"):
        return f"[{label}]({target})"
    return f"`{file}`" if label.strip("`") == file else f"{label} (`{file}`)"


def always_generated(app: Sphinx, env: object, *changes: set[str]) -> list[str]:
    """Pages whose source is not all in their file are read again at every build."""
    pages = [app.srcdir / f"{name}.md" for name in GENERATORS]
    return [path.stem for path in pages if path.is_file()]


class LinkKeys(SphinxPostTransform):
    """Make a link of every configuration key that stands in backticks, outside the reference."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        """Wrap the literals whose text begins with a key."""
        objects = self.env.domains.standard_domain.objects
        for literal in list(self.document.findall(nodes.literal)):
            key = re.split(r"[:=\s]", literal.astext(), maxsplit=1)[0]
            target = objects.get(("confval", key))
            linked = isinstance(literal.parent, nodes.reference | nodes.title)
            if target is None or "." not in key or linked or target[0] == self.env.docname:
                continue
            uri = self.app.builder.get_relative_uri(self.env.docname, target[0])
            link = nodes.reference("", "", internal=True, refuri=f"{uri}#{target[1]}")
            literal.replace_self(link)
            link += literal


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register with Sphinx."""
    app.connect("source-read", fill_in)
    app.connect("env-get-outdated", always_generated)
    app.add_post_transform(LinkKeys)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

"""The site's configuration: `python -m uv run python -m sphinx -W docs build/docs` makes it."""

import re
from collections.abc import Callable
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

project = "gla-layers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["pictures"]

html_theme = "furo"
html_title = project
html_show_sphinx = html_show_copyright = html_copy_source = False
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["math.css"]

myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 3

default_role = "py:obj"
autodoc_class_signature = "separated"
autodoc_default_options = {
    "members": True,
    "inherited-members": "Module,Pytree",
    "special-members": "__init__, __call__",
    "exclude-members": "__new__",
    "member-order": "bysource",
}
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (_mathml(False), None), (_mathml(True), None))
    # Before napoleon, which reads what this leaves.
    app.connect("autodoc-process-docstring", _mark_literal_blocks, priority=400)


def _mathml(as_block: bool) -> Callable[[HTML5Translator, nodes.Node], None]:
    """MathML, which browsers draw without a script from elsewhere."""

    def visit(translator: HTML5Translator, node: nodes.Node) -> None:
        translator.body.append(tex2mathml(node.astext(), as_block=as_block))
        raise nodes.SkipNode

    return visit


def _mark_literal_blocks(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Give the colon before an indented block of a docstring the second one that Sphinx wants."""
    text = re.sub(r"(?m)^( *)(\S.*):\n\n(?=\1 +\S)", r"\1\2::\n\n", "\n".join(lines))
    lines[:] = text.split("\n")

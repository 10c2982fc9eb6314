"""Sphinx settings: `make docs` builds docs/ into site/, with warnings as errors."""

import os
import re
from pathlib import Path

import typer.cli
import typer.main

import mmlda
from mmlda.cli import app as command_line

ROOT = Path(__file__).parents[1]

project = "mmlda"
author = copyright = "The mmlda developers"
release = mmlda.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

default_role = "py:obj"  # `name` in a docstring: a link where the name is documented, code elsewhere
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_use_type_comments = False
autodoc_inherit_docstrings = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
viewcode_line_numbers = True
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "mmlda"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/mark.svg"
html_logo = "_static/mark.svg"
html_show_sphinx = False
html_copy_source = False

# Pages whose text is a file outside docs/.
PAGES = {"contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md", "benchmarks": "benchmarks/README.md"}


def read(app, docname, source):
    """Fill in the pages above and typer's help texts, and make links work that lead from one file to another."""
    path = Path(PAGES.get(docname, f"docs/{docname}.md"))
    text = (ROOT / path).read_text(encoding="utf-8") if docname in PAGES else source[0]

    def link(match):
        words, target, anchor = match.groups(default="")
        place = os.path.normpath(path.parent / target)
        if (ROOT / place).is_dir():
            return words  # a folder of the repository has no page
        for page, file in PAGES.items():
            if place == file:
                return f"[{words}](/{page}.md{anchor})"
        return f"[{words}](/{place.removeprefix('docs/')}{anchor})" if place.startswith("docs/") else match[0]

    text = re.sub(r"(?<!!)\[([^\]]+)\]\(([\w./-]+)(#[\w-]+)?\)", link, text)
    if docname == "reference/command-line":
        command = typer.main.get_command(command_line)
        help_texts = typer.cli.get_docs_for_click(obj=command, ctx=typer.Context(command), name="mmlda")
        text += help_texts.partition("\n")[2]
    source[0] = text


def setup(app):
    app.connect("source-read", read)

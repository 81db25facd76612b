"""Turns the notebooks in docs/ into pages with their outputs, when mkdocs builds the
documentation.
"""

import html
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_BY_TYPE = ("text/html", "image/png", "text/plain")  # of one output, the first that there is


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Returns the files of the documentation, with a page in place of each notebook."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = json.loads(Path(file.abs_src_path or "").read_text("utf-8"))
        files.remove(file)
        files.append(
            File.generated(config, re.sub(r"\.ipynb$", ".md", file.src_uri), content=page(notebook))
        )
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Returns the settings, whose navigation names the pages of the notebooks."""
    config.nav = json.loads(json.dumps(config.nav).replace('.ipynb"', '.md"'))
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns a page whose links to notebooks lead to their pages."""
    return re.sub(r"(\]\([^)\s]*)\.ipynb(?=[)#])", r"\1.md", markdown)


def page(notebook: dict[str, Any]) -> str:
    """Returns a notebook as Markdown: its texts, its code, and the outputs as HTML."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts += [f"```python\n{source}\n```", *map(_output, cell["outputs"])]
        else:
            parts.append(source)
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    """Returns one output as a block of HTML, on lines without gaps, which would end the
    block.
    """
    if output["output_type"] == "error":
        raise ValueError(f"a notebook holds an error: {output['ename']}: {output['evalue']}")
    data = {"text/plain": output["text"]} if "text" in output else output["data"]
    kind = next(kind for kind in _BY_TYPE if kind in data)
    content = "".join(data[kind])
    if kind == "image/png":
        content = f'<img alt="figure" src="data:image/png;base64,{content.strip()}">'
    elif kind == "text/plain":
        content = f"<pre>{html.escape(content.rstrip())}</pre>"
    return '<div class="cell-output">' + content.replace("\n", "&#10;") + "</div>"

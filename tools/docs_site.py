"""Hooks of the documentation site: notebooks become pages, and no page fetches anything."""

from __future__ import annotations

import json
import re
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_TERMINAL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_OBJECT = re.compile(r"(doc-object-name[^>]*>)(segcal(?:\.\w+)+)(?=<)")
_PERCENT = re.compile(r"(<(?:pre|code)\b.*?</(?:pre|code)>)|(?<=\d) (?=%)", re.S)
_ELSEWHERE = re.compile(r"""<(?:script|link|img|iframe)\b[^>]+\b(?:src|href)="?(?:https?:)?//""")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = json.loads(Path(str(file.abs_src_path)).read_text(encoding="utf-8"))
        uri = file.src_uri.replace(".ipynb", ".md")
        files.append(File.generated(config, uri, content=page_of(notebook)))
        files.remove(file)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links of pages that also lie in the repository, as the site has them."""
    if page.is_homepage or page.parent is None:  # a list beside it would say little
        page.meta["hide"] = ["navigation"]
    markdown = re.sub(r"\]\(docs/([\w.]+md)", r"](\1", markdown)
    markdown = re.sub(r"\]\(((?:\.\./)?tutorials/\w+)\.ipynb\)", r"](\1.md)", markdown)
    if "/" in page.file.src_uri:
        return markdown
    return re.sub(r"\[([^\]]+)\]\((?:\.\./|data/)[^)]*\)", r"`\1`", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Names as one types them, and lines that break where a reader would break them."""
    html = _OBJECT.sub(lambda match: match[1] + public_name(match[2]), html)
    # Not inside short code and options, such as --in-the-middle, nor between 90 and %.
    html = re.sub(r"<code>([^<\n]{1,26})</code>", r'<code class="short">\1</code>', html)
    options = partial(re.sub, r"--[\w-]+", r'<span class="short">\g<0></span>')
    html = re.sub(r"<code>[^<\n]{27,}</code>", lambda match: options(match[0]), html)
    return _PERCENT.sub(lambda match: match[1] or "\u00a0", html)


def public_name(path: str) -> str:
    """The shortest name of what is defined at `path`: segcal.Report for …metrics.report.Report."""
    *modules, name = path.split(".")
    defined = getattr(import_module(".".join(modules)), name)
    for depth in range(1, len(modules)):
        package = ".".join(modules[:depth])
        if getattr(import_module(package), name, None) is defined:
            return f"{package}.{name}"
    return path


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Refuse a page that would fetch something when it is opened."""
    found = _ELSEWHERE.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri}: expected no requests, but got {found[0]}")
    return output


def page_of(notebook: dict[str, Any]) -> str:
    """The Markdown of a notebook with its outputs; pictures are inside it."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source.rstrip(';')}\n```")
        printed = [o for o in cell["outputs"] if o.get("name") == "stdout"]
        text = "".join("".join(output["text"]) for output in printed)
        for data in (output.get("data", {}) for output in cell["outputs"]):
            if "image/png" in data:
                png = "".join(data["image/png"]).replace("\n", "")
                parts.append(f"![](data:image/png;base64,{png})")
            elif "text/markdown" in data:
                parts.append("".join(data["text/markdown"]))
            else:
                text += "".join(data.get("text/plain", []))
        if text.strip():
            parts.append(f"``` {{.text .output}}\n{_TERMINAL.sub('', text).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"

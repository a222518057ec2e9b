"""mkdocs hook: adds the repository's own pages and the notebook to the site, and pages' sources.

Links of the repository's pages are written for the repository. The button in a page's corner leads
to the file that it was made of, which the site has too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "rust/core/README.md": "registry.md",
    "CHANGELOG.md": "changelog.md",
}
NOTEBOOK, NOTEBOOK_PAGE = "examples/steering.ipynb", "recipes/notebook.md"
SVG = "image/svg+xml"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds pages, with links rewritten for the site, and the sources of all pages."""
    root = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        text = (root / source).read_text(encoding="utf-8")
        for linked, there in PAGES.items():
            text = text.replace(f"]({linked}", f"]({there}")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    text, pictures = _notebook(json.loads((root / NOTEBOOK).read_text(encoding="utf-8")))
    files.append(File.generated(config, NOTEBOOK_PAGE, content=text))
    for name, picture in pictures.items():
        path = f"{Path(NOTEBOOK_PAGE).parent}/{name}"
        files.append(File.generated(config, path, content=picture))
    for source in [_source_of(file.src_uri) for file in files.documentation_pages()]:
        files.append(File.generated(config, _in_site(source), content=(root / source).read_bytes()))


def on_page_markdown(_markdown: str, page: Page, **_: Any) -> None:
    """Points the button of the theme to the page's source."""
    source = _in_site(_source_of(page.file.src_uri))
    page.edit_url = get_relative_url(source, page.url)


def _source_of(page: str) -> str:
    """Returns the path of a page's source in the repository."""
    others = {NOTEBOOK_PAGE: NOTEBOOK} | {there: source for source, there in PAGES.items()}
    return others.get(page, f"docs/{page}")


def _in_site(source: str) -> str:
    """Returns the path of a source in the site: as text, for a browser to show it."""
    return f"sources/{source}.txt"


def _notebook(notebook: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Returns the cells and their outputs as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, str] = {}
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            data = output["data"]
            if SVG in data:
                name = f"notebook-{len(pictures) + 1}.svg"
                pictures[name] = "".join(data[SVG])
                parts.append(f"![Picture drawn by the cell above]({name})")
            else:
                parts.append(f"```text\n{''.join(data['text/plain'])}\n```")
    return "\n\n".join(parts), pictures

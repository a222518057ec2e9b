"""mkdocs hook: adds the repository's own pages and the notebook to the site, and pages' sources.

Links of the repository's pages are written for the repository. The button in a page's corner leads
to the file that it was made of, which the site has too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "rust/core/README.md": "registry.md",
    "CHANGELOG.md": "changelog.md",
}
NOTEBOOK, NOTEBOOK_PAGE = "examples/steering.ipynb", "recipes/notebook.md"
REFERENCE = "reference.md"
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
    _split_reference(files, config, root / "docs" / REFERENCE)
    for source in {_source_of(file.src_uri) for file in files.documentation_pages()}:
        files.append(File.generated(config, _in_site(source), content=(root / source).read_bytes()))


def on_page_markdown(_markdown: str, page: Page, **_: Any) -> None:
    """Points the button of the theme to the page's source."""
    source = _in_site(_source_of(page.file.src_uri))
    page.edit_url = get_relative_url(source, page.url)


def _source_of(page: str) -> str:
    """Returns the path of a page's source in the repository."""
    if page.startswith("reference/"):
        return f"docs/{REFERENCE}"
    others = {NOTEBOOK_PAGE: NOTEBOOK} | {there: source for source, there in PAGES.items()}
    return others.get(page, f"docs/{page}")


def _split_reference(files: Files, config: MkDocsConfig, reference: Path) -> None:
    """Adds a page for each part of the reference; its own page has the first, and links to all."""
    first, *parts = re.split(r"^## ", reference.read_text(encoding="utf-8"), flags=re.MULTILINE)
    pages, links = [], []
    for part in parts:
        title, _, text = part.partition("\n")
        path = f"reference/{_anchor(title)}.md"
        # Links of the page are written for one folder up.
        text = re.sub(r"\]\((?!#|http)([^)]+)\)", r"](../\1)", text)
        files.append(File.generated(config, path, content=f"# {title}\n{text}"))
        pages.append({title.replace("`", ""): path})
        links.append(f"- [{title}]({path})")
    start = first.replace("\n", "\n\n" + "\n".join(links) + "\n\n## Modules with hooks\n", 1)
    files.remove(files.src_uris[REFERENCE])
    files.append(File.generated(config, REFERENCE, content=start))
    assert config.nav is not None  # noqa: S101 (mkdocs.yml has one)
    for each in config.nav:
        if each.get("Reference") == REFERENCE:
            each["Reference"] = [REFERENCE, *pages]


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


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

"""mkdocs hook: adds the repository's own pages to the site.

Their links are written for the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "rust/core/README.md": "registry.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages, with links rewritten for the site."""
    for source, page in PAGES.items():
        text = (Path(config.config_file_path).parent / source).read_text(encoding="utf-8")
        for linked, there in PAGES.items():
            text = text.replace(f"]({linked}", f"]({there}")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))

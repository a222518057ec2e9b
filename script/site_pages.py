"""A hook of mkdocs: the repository's own pages are pages of the site too.

They are written once, where people and cargo look for them, with links that hold there.
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
    """Adds them, with their links turned to where things are on the site."""
    for source, page in PAGES.items():
        text = (Path(config.config_file_path).parent / source).read_text(encoding="utf-8")
        for linked, there in PAGES.items():
            text = text.replace(f"]({linked}", f"]({there}")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))

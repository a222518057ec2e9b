"""Pages fit the site, and the site has what its theme promises."""

from __future__ import annotations

import importlib
import re
import shutil
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import pytest

from support.pages import DOCS, README, ROOT, code_lines

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = 80  # of a code block in the theme
WIDTH, TABS = 1280, 9  # of a small laptop's screen, and the tabs on it
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
COMPAT = ("compat.mi_crow", "compat.transformer_lens", "compat.transformers")
FRONTS = (*COMPAT, "analysis", "data", "detectors", "errors", "plot", "rows", "service", "typing")
EXAMPLE = re.compile(r"^ *((?:>>>|\.\.\.) .*)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_fits_the_page(page: Path) -> None:
    assert [(number, line) for number, line in code_lines(page) if len(line) > COLUMNS] == []


def test_examples_of_the_reference_fit_the_page() -> None:
    examples = {
        (file.name, example)
        for file in (ROOT / "python").rglob("*.py")
        for example in EXAMPLE.findall(file.read_text())
    }
    assert len(examples) > 50
    assert [each for each in examples if len(each[1]) > COLUMNS] == []


def test_titles_of_the_reference_are_names_that_users_type() -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    fronts = [importlib.import_module(f"ferrohook.{name}") for name in FRONTS]
    public = [importlib.import_module("ferrohook"), *fronts]
    wrong = []
    for path in re.findall(r"^::: (\S+)", (DOCS / "reference.md").read_text(), re.MULTILINE):
        module, _, name = path.rpartition(".")
        here = importlib.import_module(module)
        assert hasattr(here, name), path
        if here not in public and any(name in front.__all__ for front in public):
            wrong.append(path)
    assert wrong == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    pytest.importorskip("material")
    commands, config = pytest.importorskip("mkdocs.commands.build"), ROOT / "mkdocs.yml"
    load_config = pytest.importorskip("mkdocs.config").load_config
    folder = tmp_path_factory.mktemp("site")
    commands.build(load_config(str(config), site_dir=str(folder)))
    return folder


def pages_of(site: Path) -> dict[str, str]:
    """Pages by address."""
    return {
        "/" + str(path.relative_to(site)).removesuffix("index.html"): path.read_text()
        for path in site.rglob("index.html")
    }


def test_the_second_tab_tells_which_api_to_use(site: Path) -> None:
    tabs = re.findall(r'class="md-tabs__link">\s*(.*?)\s*</a>', pages_of(site)["/"])
    assert tabs[:2] == ["Start", "Which API should I use?"]
    assert len(tabs) <= TABS


def test_no_tab_is_cut(site: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("needs Debian's chromium, and there is none here")
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 720})
        page.goto((site / "index.html").as_uri())
        links = page.locator(".md-tabs__link")
        ends = [box["x"] + box["width"] for box in map(place, links.all())]
        browser.close()
    assert max(ends) <= WIDTH


def place(link: Any) -> dict[str, float]:
    box = link.bounding_box()
    assert box is not None, "not shown"
    found: dict[str, float] = box
    return found


def test_each_page_can_be_dark_and_has_its_source(site: Path) -> None:
    pages = pages_of(site)
    assert len(pages) > 30
    for address, page in pages.items():
        assert 'data-md-color-scheme="slate"' in page
        assert '"content.code.copy"' in page
        (source,) = re.findall(r'<a href="([^"]+)" title="View source of this page"', page)
        text = (site / urljoin(address, source).removeprefix("/")).read_text()
        path = urljoin(address, source).partition("/sources/")[2].removesuffix(".txt")
        assert text == (ROOT / path).read_text()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    fetched = re.compile(r'<(?:script|img|iframe)[^>]* src="([^"]+)"|<link[^>]* href="([^"]+)"')
    for page in pages_of(site).values():
        urls = ["".join(each) for each in fetched.findall(page)]
        assert [url for url in urls if urlsplit(url).netloc] == []


def test_the_notebook_is_a_page_with_sharp_pictures(site: Path) -> None:
    page = (site / "recipes/notebook/index.html").read_text()
    pictures = re.findall(r'src="\.\./(notebook-\d\.svg)"', page)
    assert len(pictures) == 3
    for picture in pictures:
        assert (site / "recipes" / picture).read_text().rstrip().endswith("</svg>")
    assert "A lens: what would each layer say?" in page

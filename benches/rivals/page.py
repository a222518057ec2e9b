"""`docs/rivals.md`: its table is made of `docs/rivals.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benches.rivals.outcomes import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCS: Final = Path(__file__).parents[2] / "docs"
JSON: Final = DOCS / "rivals.json"
PAGE: Final = DOCS / "rivals.md"
BEGIN: Final = "<!-- table of rivals.json: make rivals -->"
END: Final = "<!-- end -->"


def read() -> dict[str, Any]:
    """Returns the outcomes of the last run."""
    if not JSON.exists():
        return {"versions": {}, "scenes": {}}
    found: dict[str, Any] = json.loads(JSON.read_text())
    return found


def write() -> None:
    """Writes the table into the page."""
    before, rest = PAGE.read_text().split(BEGIN)
    behind = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(read())}\n{END}{behind}")


def table(found: Mapping[str, Any]) -> str:
    """Returns the table of systems and scenes."""
    systems = [*found["versions"]]
    head = [f"{name} {version.partition('+')[0]}" for name, version in found["versions"].items()]
    lines = [f"| scene | {' | '.join(head)} |", f"| --- {'| ---: ' * len(systems)}|"]
    for name, outcomes in found["scenes"].items():
        cells = [Outcome(**outcomes[it]).cell if it in outcomes else "" for it in systems]
        lines.append(f"| [{name}](#{name}) | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])

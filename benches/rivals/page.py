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
SYSTEMS_BEGIN: Final = "<!-- systems of rivals.json -->"
SYSTEMS_END: Final = "<!-- end of systems -->"


def read() -> dict[str, Any]:
    """Returns the outcomes of the last run."""
    if not JSON.exists():
        return {"systems": {}, "scenes": {}}
    found: dict[str, Any] = json.loads(JSON.read_text())
    return found


def write() -> None:
    """Writes the tables into the page."""
    PAGE.write_text(filled(PAGE.read_text(), read()))


def filled(text: str, found: Mapping[str, Any]) -> str:
    """Returns the page with the tables of a run."""
    text = _between(text, BEGIN, END, table(found))
    return _between(text, SYSTEMS_BEGIN, SYSTEMS_END, caveats(found))


def _between(text: str, begin: str, end: str, inside: str) -> str:
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{inside}\n{end}{rest.split(end)[1]}"


def table(found: Mapping[str, Any]) -> str:
    """Returns the table of systems and scenes."""
    systems = [*found["systems"]]
    head = [f"{it['package']} {it['version']}" for it in found["systems"].values()]
    lines = [f"| scene | {' | '.join(head)} |", f"| --- {'| ---: ' * len(systems)}|"]
    for name, outcomes in found["scenes"].items():
        cells = [Outcome(**outcomes[it]).cell if it in outcomes else "" for it in systems]
        lines.append(f"| [{name}](#{name}) | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def caveats(found: Mapping[str, Any]) -> str:
    """Returns the systems' ways and caveats, and the reasons for absent scenes."""
    lines = []
    for name, system in found["systems"].items():
        lines.append(f"**{system['package']} {system['version']}**: {system['way']}.\n")
        for scene, outcomes in found["scenes"].items():
            reason = system["caveats"].get(scene) or outcomes.get(name, {}).get("absent")
            if reason:
                lines.append(f"- `{scene}`: {reason}.")
        lines.append("")
    return "\n".join(lines)

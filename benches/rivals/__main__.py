"""`python -m benches.rivals`: plays scenes, see `--help`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import warnings

# Read by transformers as it is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benches.rivals import page
from benches.rivals.children import ANSWER, play_all
from benches.rivals.scenes import SCENES
from benches.rivals.systems import SYSTEMS, system_of


def main() -> None:
    """Plays the scenes and systems that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m benches.rivals", description=__doc__)
    parser.add_argument("scene", nargs="?", choices=[*SCENES, "all"], help="one scene, or all")
    parser.add_argument("system", nargs="?", choices=SYSTEMS, help="one system, in this process")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--page", action="store_true", help="write the page of docs/rivals.json")
    arguments = parser.parse_args()
    if arguments.page:
        page.write()
        return
    if arguments.system is None:
        play_all(arguments.scene)
        return
    # Scenes record the warnings themselves.
    warnings.simplefilter("ignore")
    system = system_of(arguments.system)
    names = SCENES if arguments.scene in {None, "all"} else [arguments.scene]
    for name in names:
        outcome = SCENES[name].play(system)
        if arguments.json:
            described = {
                "package": system.package,
                "version": system.version(),
                "way": system.way,
                "caveats": dict(system.caveats),
            }
            found = {"scene": name, "system": described, **dataclasses.asdict(outcome)}
            print(f"{ANSWER}{json.dumps(found)}", flush=True)
        else:
            more = (
                f" ({outcome.absent or outcome.first})" if outcome.absent or outcome.first else ""
            )
            print(f"{name:20} {outcome.cell.strip('*')}{more}", flush=True)
    os._exit(0)  # past threads that hang


if __name__ == "__main__":
    main()

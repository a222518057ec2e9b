"""Runs the steps of the public CI here: `script/workflow.py [--list] [JOB...]`.

A step that is a command runs as there, by `bash -e`, once for each value of the matrix. A step
that uses an action is listed as not run: this machine has to have its tools already.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent


def commands(job: dict[str, Any]) -> list[tuple[str, bool]]:
    """Texts of a job's steps, each with True if it is a command.

    Raises:
        ValueError: a command has an expression that is not of the matrix.
    """
    matrix = job.get("strategy", {}).get("matrix", {})
    found: dict[tuple[str, bool], None] = {}
    for values in itertools.product(*matrix.values()):
        known = {f"matrix.{name}": value for name, value in zip(matrix, values, strict=True)}
        for step in job["steps"]:
            if "uses" in step:
                found[step["uses"], False] = None
                continue
            text = step["run"]
            for expression, value in known.items():
                text = text.replace(f"${{{{ {expression} }}}}", str(value))
            if "${{" in text:
                msg = f"{text!r} has an expression that is not one of the matrix"
                raise ValueError(msg)
            found[text, True] = None
    return [*found]


def succeeds(command: str) -> bool:
    """Runs a command in the root of the checkout."""
    bash = ["bash", "-e", "-c", command]
    return subprocess.run(bash, check=False, cwd=ROOT).returncode == 0  # noqa: S603 (the workflow's)


def main(arguments: list[str] | None = None) -> int:
    """Runs jobs one after the other; returns 1 if a command failed."""
    parser = argparse.ArgumentParser(prog="workflow.py", description=__doc__)
    parser.add_argument("jobs", metavar="JOB", nargs="*")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument(
        "--file", metavar="PATH", type=Path, default=ROOT / ".github/workflows/ci.yml"
    )
    options = parser.parse_args(arguments)
    jobs = yaml.safe_load(options.file.read_text())["jobs"]
    if unknown := {*options.jobs} - jobs.keys():
        parser.error(f"the workflow has no job {min(unknown)}: it has {', '.join(jobs)}")
    failed = []
    for name in options.jobs or jobs:
        for text, runs in commands(jobs[name]):
            if not runs:
                print(f"{name}: not run: uses {text}", flush=True)
                continue
            print(f"{name}: {text}", flush=True)
            if not options.list and not succeeds(text):
                failed.append(name)
                break
    for name in failed:
        print(f"FAILED: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

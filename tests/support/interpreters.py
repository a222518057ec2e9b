"""Interpreters that run one piece of code to their end."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

from support.limits import LIMIT

IMPORTS = """
import gc, os, sys, threading, time, warnings, weakref
"""
# Importing torch takes seconds: one template interpreter imports it, the others are forked from it.
_TEMPLATE = f"""
{IMPORTS}
import atexit, json
import torch
from torch import nn
import ferrohook as fh
fh.HookedModule
# Collecting imported objects takes half a second; extensions look for leaks at exit.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)
while True:
    request = sys.stdin.readline()
    if not request:
        os._exit(0)
    with warnings.catch_warnings(action="ignore"):  # numpy has threads
        child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
code, out, err = json.loads(request)
os.close(0)
os.dup2(os.open(out, os.O_WRONLY), 1)
os.dup2(os.open(err, os.O_WRONLY), 2)
del child, request, out, err
exec(compile(code, "<string>", "exec"))
"""


def run_fresh(code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", IMPORTS + code],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def run_with_torch(code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a forked interpreter that has imported torch, `nn` and `fh`."""
    template = _template()
    assert template.stdin
    assert template.stdout
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        out.touch()
        err.touch()
        template.stdin.write(json.dumps([code, str(out), str(err)]) + "\n")
        template.stdin.flush()
        ready, _, _ = select.select([template.stdout], [], [], LIMIT)
        if not ready:
            _end(template)
            raise subprocess.TimeoutExpired(code, LIMIT, out.read_bytes(), err.read_bytes())
        status = int(template.stdout.readline())
        return subprocess.CompletedProcess(code, status, out.read_text(), err.read_text())


def assert_ends_well(done: subprocess.CompletedProcess[str], printed: str = "") -> None:
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


@functools.cache
def _template() -> subprocess.Popen[str]:
    template = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", _TEMPLATE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(_end, template)
    return template


def _end(template: subprocess.Popen[str]) -> None:
    """Kills the template and its forks."""
    _template.cache_clear()
    if template.poll() is None:
        os.killpg(template.pid, 9)
    template.communicate()

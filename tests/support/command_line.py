"""Errors of the command line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ferrohook.cli import main

if TYPE_CHECKING:
    import pytest


def error_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error line on stderr; asserts exit code 2 and an empty stdout."""
    try:
        code: object = main(argv)
    except SystemExit as leaving:  # argparse exits
        code = leaving.code
    told = capsys.readouterr()
    assert code == 2
    assert not told.out
    assert re.fullmatch(rf"ferrohook( {argv[0] if argv else ''})?: .+\n", told.err)
    return told.err

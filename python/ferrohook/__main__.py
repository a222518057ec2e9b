"""`python -m ferrohook`: see `ferrohook.cli`."""

import sys

from ferrohook.cli import main

if __name__ == "__main__":
    sys.exit(main())

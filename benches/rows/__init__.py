"""A file per subject; its list `GROUPS` is measured.

Public names of ferrohook alone are used here: `--against` runs these files on older builds.
"""

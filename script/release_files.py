"""Checks the wheels of a release, and writes its SBOM and checksums: `release_files.py FOLDER`."""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class ReleaseError(Exception):
    """A file of the release is not as it should be."""


def crates() -> set[tuple[str, str]]:
    """Names and versions of all crates in Cargo.lock."""
    packages = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    return {(each["name"], each["version"]) for each in packages}


def check(wheel: Path) -> dict[str, Any]:
    """Returns the SBOM of a wheel.

    Raises:
        ReleaseError: it has none, or one of crates that were not locked; or its extension has
            another unwinder than libgcc's, see `script/wheel`.
    """
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        (extension,) = (name for name in names if name.endswith(".so"))
        if "linux" in wheel.name and b"libgcc_s.so.1" not in files.read(extension):
            msg = f"{wheel.name}: {extension} is not linked to libgcc_s.so.1"
            raise ReleaseError(msg)
        path = next((name for name in names if "/sboms/" in name), None)
        if path is None:
            msg = f"{wheel.name} has no SBOM: build it by a newer maturin"
            raise ReleaseError(msg)
        sbom: dict[str, Any] = json.loads(files.read(path))
    found = {(each["name"], each["version"]) for each in sbom["components"]}
    if not found or found - crates():
        msg = f"{wheel.name}: its SBOM has crates that are not in Cargo.lock: {found - crates()}"
        raise ReleaseError(msg)
    return sbom


def main(folder: Path) -> None:
    """Checks the wheels in a folder; writes `ferrohook-VERSION.cdx.json` and `SHA256SUMS`."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        msg = f"there is no wheel in {folder}"
        raise ReleaseError(msg)
    sbom, *_ = [check(wheel) for wheel in wheels]  # all have the same crates
    version = sbom["metadata"]["component"]["version"]
    # The ids of our own crates are their folders.
    text = json.dumps(sbom, indent=1).replace(f"path+file://{ROOT}/", "path+file:///ferrohook/")
    (folder / f"ferrohook-{version}.cdx.json").write_text(text + "\n")
    print(f"sbom: {len(sbom['components'])} crates, {sbom['bomFormat']} {sbom['specVersion']}")

    sums = folder / "SHA256SUMS"
    sums.unlink(missing_ok=True)
    digests = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
    ]
    sums.write_text("".join(digests))
    print(f"checksums: {len(digests)} files in {sums}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except ReleaseError as error:
        sys.exit(f"release: {error}")

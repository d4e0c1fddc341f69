"""Small environments with nothing in them but the names and versions of packages: real interpreters, no engine."""

from __future__ import annotations

import sys
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path


def environment(home: Path, packages: Mapping[str, str]) -> str:
    """A virtual environment whose interpreter finds these packages installed; the interpreter's path."""
    venv.create(home, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name, number in packages.items():
        about = home / "lib" / version / "site-packages" / f"{name.replace('-', '_')}-{number}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    return str(home / "bin" / "python")


def wheel(folder: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    """A wheel that pip can install without an index."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    about = f"{name.replace('-', '_')}-{version}.dist-info"
    listed = files | {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{member},,\n" for member in [*listed, f"{about}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in (listed | {f"{about}/RECORD": record}).items():
            archive.writestr(member, text)
    return path

"""Models of engines that load Hugging Face's layout: a folder on this machine, or a repository by its name."""

from __future__ import annotations

import re
from pathlib import Path

from specbench.cell import Method
from specbench.errors import Unsupported

_REPOSITORY = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def hf_model(name: str, engine: str, field: str = "model") -> tuple[str, str | None]:
    """Folder or repository, and its revision. Raises Unsupported for what the engine cannot load."""
    if Path(name).expanduser().is_dir():
        return str(Path(name).expanduser().resolve()), None
    found = _REPOSITORY.fullmatch(name.removeprefix("hf:"))
    if found is None or name.endswith(".gguf"):
        raise Unsupported(
            field, f"{engine} loads a folder in Hugging Face's layout or hf:ORG/NAME[@revision], not {name}"
        )
    return found["name"], found["revision"]


def with_draft(method: Method, engine: str, title: str) -> Method:
    """The method with its draft model as the launcher of `engine`, whose name is `title`, takes it."""
    if method.draft is None:
        return method
    path, revision = hf_model(method.draft, engine, "method.draft")
    if revision is not None:
        raise Unsupported("method.draft", f"{title} takes a revision of the target only; leave @revision out")
    return method.model_copy(update={"draft": path})

"""Finding a model by name or path: the shipped catalogue, a `config.json`, a folder that holds one, a GGUF file.

Catalogue files are Hugging Face configs with one more key, `_source`. Boundary: local files; nothing is downloaded.
"""

from __future__ import annotations

import json
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from models_roofline.architecture import Architecture
from models_roofline.errors import RooflineError, hint
from models_roofline.families.registry import from_config

LARGEST_CONFIG = 2**24
"""Characters of a config, a thousand times what any has; what is larger is another file, or has no end."""


def catalogue() -> tuple[str, ...]:
    """Names of the shipped configs."""
    return tuple(sorted(_shipped()))


def _shipped() -> dict[str, Traversable]:
    folder = resources.files("models_roofline") / "data" / "models"
    return {item.name.removesuffix(".json"): item for item in folder.iterdir() if item.name.endswith(".json")}


def load_model(name_or_path: str | Path) -> Architecture:
    """The architecture of a catalogue name, a config, a folder with a `config.json`, or a `.gguf` file.

    Raises RooflineError in words, with the nearest names, where it is none of these.
    """
    shipped = _shipped()
    if str(name_or_path) in shipped:
        name = str(name_or_path)
        return from_config(_fields(shipped[name].read_text(encoding="utf-8"), name), name)
    path = Path(name_or_path)
    if path.suffix.lower() == ".gguf":
        from models_roofline.gguf_file import load_gguf

        return load_gguf(path)
    if path.exists():
        return load_config(path)
    raise RooflineError(
        f"--model: {str(name_or_path)!r} is neither a known model nor a file or folder that exists; "
        f"{hint(str(name_or_path), catalogue(), most=3)}"
    )


def load_config(path: str | Path) -> Architecture:
    """The architecture of a `config.json`, or of the folder that holds it; named after the folder or the file."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    text = _read(file)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    fields = _fields(text, name)
    beside = file.with_name("hf_quant_config.json")
    if "quantization_config" not in fields and file.name == "config.json" and beside.is_file():
        fields["quantization_config"] = _exported(_fields(_read(beside), f"{name}: {beside.name}"))
    return from_config(fields, name)


def _exported(fields: dict[str, object]) -> dict[str, object]:
    """What ModelOpt writes into a file of its own, as a `quantization_config`."""
    inner = fields.get("quantization")
    return {"quant_method": "modelopt", **(inner if isinstance(inner, dict) else {})}


def _read(file: Path) -> str:
    try:
        with file.open(encoding="utf-8-sig") as opened:
            text = opened.read(LARGEST_CONFIG + 1)
    except FileNotFoundError:
        raise RooflineError(f"--model: there is no {file}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RooflineError(f"--model: {file} cannot be read as text: {error}.") from None
    if len(text) > LARGEST_CONFIG:
        raise RooflineError(
            f"--model: {file} is larger than {LARGEST_CONFIG // 2**20} MiB and no config.json; name that file or its folder."
        )
    return text


def _fields(text: str, name: str) -> dict[str, object]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also whole numbers of thousands of digits
        raise RooflineError(f"{name}: the config is not valid JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise RooflineError(f"{name}: the config must be a JSON object of fields.")
    return fields

"""The same model in the form that vLLM and others read: a Hugging Face folder made from a GGUF file.

The weights are dequantised and stored as bfloat16, so they are the GGUF's values rounded to 8 bits of mantissa: near
enough to compare engines, not bit for bit the same. The tokenizer and chat template are the file's own
(`runners.tokens`). A folder is made under a name of its own and put in place when it is whole; it lies in the cache
beside the model, named by the hash of the file it came from, and `specbench.json` in it records what it is.

Boundary: files, and one run of `workers/hf_convert` in an interpreter that has transformers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import orjson

from runners.chat_template import ChatTemplate
from runners.tokens import Tokenizer
from specbench.cell import digest
from specbench.errors import SpecbenchError
from specbench.models import ModelFile, cache_dir, sha256_of

CONVERT = Path(__file__).with_name("workers") / "hf_convert.py"
RECORD = "specbench.json"
DTYPE = "bfloat16"
_TIMEOUT_S = 3600.0
"""For a large model on a slow disk; the small catalogue model takes 20 s."""


def place_of(model: ModelFile) -> Path:
    """Where the folder of a GGUF file is, or will be: beside a model of the cache, else in a place of its own there."""
    models = cache_dir() / "models"
    beside = model.path.parent if model.path.is_relative_to(models) else models / _plain(model.path.stem)
    return beside / f"hf-{model.sha256[:16]}"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def hf_folder(model: ModelFile, python: str) -> Path:
    """The folder of a GGUF file, made now where it is not there. Raises SpecbenchError with one sentence.

    `python` is an interpreter with transformers, torch, gguf and accelerate.
    """
    place = place_of(model)
    if (place / RECORD).is_file():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".hf-", dir=place.parent) as scratch:
        part = Path(scratch) / "model"
        part.mkdir()
        said = _convert(model, part, python)
        sizes = _write_tokenizer(model, part)
        record = {"gguf_sha256": model.sha256, "weights_sha256": weights_sha256(part)} | said | sizes
        (part / RECORD).write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2))
        _put(part, place)
    return place


def _put(part: Path, place: Path) -> None:
    """Another process may have made the same folder meanwhile; either is as good."""
    try:
        part.rename(place)
    except OSError:
        if not (place / RECORD).is_file():
            shutil.rmtree(place, ignore_errors=True)  # what an old version left half made
            part.rename(place)


def record_of(folder: Path) -> dict[str, Any]:
    """What a folder of ours says of itself; empty for one that somebody else made."""
    try:
        found = orjson.loads((folder / RECORD).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def weights_sha256(folder: Path) -> str:
    """One hash over the weight files of a folder and its config.json, by their names and hashes."""
    files = sorted({*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("config.json")})
    if not any(path.name != "config.json" for path in files):
        raise SpecbenchError(
            f"model: {folder} holds no weights (*.safetensors); name a folder that transformers can read."
        )
    return digest({path.name: sha256_of(path) for path in files}, 64)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def weight_bytes(folder: Path) -> int | None:
    """Bytes of the weights that a step reads; None for experts, of which a step reads some."""
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    text = config.get("text_config") or {}
    if any(config.get(name) or text.get(name) for name in _EXPERTS):
        return None
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None


# --- making it --------------------------------------------------------------------------------------------


def _convert(model: ModelFile, folder: Path, python: str) -> dict[str, Any]:
    command = [python, str(CONVERT), str(model.path), str(folder), DTYPE]
    env = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=_TIMEOUT_S, check=True
        )
        said: dict[str, Any] = orjson.loads(done.stdout.strip().rpartition("\n")[2])
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SpecbenchError(
            f"model: {model.path.name} could not be written as a Hugging Face folder by {python} ({_why(error)}); "
            "it needs transformers, torch, gguf and accelerate there, or give a folder as model."
        ) from None
    return said


def _why(error: Exception) -> str:
    said = getattr(error, "stderr", None) or str(error)
    lines = [line.strip() for line in str(said).splitlines() if line.strip()]
    return lines[-1][:300].rstrip(".") if lines else type(error).__name__


def _write_tokenizer(model: ModelFile, folder: Path) -> dict[str, Any]:
    """The file's own tokenizer and template, with the special tokens and lengths that readers look for."""
    tokenizer = Tokenizer.from_gguf(model.path)
    if tokenizer.template is None:
        raise SpecbenchError(
            f"model: {model.name} has no chat template, so it is a base model; name an instruct model."
        )
    tokenizer.inner.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(tokenizer.template.text, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= _special(tokenizer.template)
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
    return {"tokenizer_sha256": tokenizer.sha256, "template_sha256": tokenizer.template_sha256}


def _special(template: ChatTemplate) -> dict[str, str]:
    named = {"bos_token": template.bos, "eos_token": template.eos}
    return {name: text for name, text in named.items() if text}

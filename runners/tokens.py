"""Prompts as token ids, made once and outside every engine, so that all engines of a comparison get the same ones.

A `Tokenizer` comes from the model's own description, a GGUF file or a Hugging Face folder, applies the model's chat
template, and knows the hashes of both. Ids made from a GGUF file are those that llama.cpp makes of the same messages;
docs/measurements.md says on how many texts that was checked.

Boundary: files and text. Sending ids is the engines', comparing what the server counted `specbench.validity`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import tokenizers

from runners.chat_template import ChatTemplate, Messages, Scalar
from runners.gguf_tokenizer import Vocabulary
from specbench.errors import SpecbenchError
from specbench.models import resolve

_MENDED = 'name an instruct model, or set workload.prompts = "messages"'


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer with its chat template. Encoding remembers what it was given, so a prompt costs once."""

    inner: tokenizers.Tokenizer
    sha256: str
    """Of what decides the ids of a text: vocabulary, merges and settings, or the folder's tokenizer.json."""
    template: ChatTemplate | None
    adds_bos: bool = False
    """Every prompt begins with BOS; where the template writes it too, it stands there once."""
    _known: dict[bytes, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    # --- from files ---------------------------------------------------------------------------------------

    @classmethod
    def from_model(cls, path: Path) -> Tokenizer:
        """The tokenizer of a GGUF file or a Hugging Face folder. Raises SpecbenchError where it has none."""
        return cls.from_folder(path) if path.is_dir() else cls.from_gguf(path)

    @classmethod
    def from_gguf(cls, path: Path) -> Tokenizer:
        """The tokenizer of a GGUF file. Raises Unsupported for a kind that is not known here."""
        vocabulary = Vocabulary.read(path)
        text, bos, eos = vocabulary.chat_template, vocabulary.special("bos"), vocabulary.special("eos")
        template = ChatTemplate(text, bos, eos) if text else None
        if vocabulary.adds_bos and not bos:
            raise SpecbenchError(
                f"model: {path.name} begins prompts with a BOS token and names none; {_MENDED}."
            )
        return cls(vocabulary.build(), vocabulary.sha256, template, vocabulary.adds_bos)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder: tokenizer.json, and the template beside it."""
        path = folder / "tokenizer.json"
        try:
            text = path.read_bytes()
            inner = tokenizers.Tokenizer.from_buffer(text)
        except OSError:
            raise SpecbenchError(
                f"model: {folder} has no tokenizer.json; save the model's fast tokenizer into it, or set "
                'workload.prompts = "messages".'
            ) from None
        except Exception as error:  # the package raises bare Exception for what it cannot read
            raise SpecbenchError(f"model: {path} cannot be read as a tokenizer ({error}).") from None
        return cls(inner, hashlib.sha256(text).hexdigest(), _folder_template(folder))

    def with_kwargs(self, kwargs: Mapping[str, Scalar]) -> Tokenizer:
        """The same tokenizer with arguments for its template, such as `enable_thinking`."""
        template = self.template and replace(self.template, kwargs=dict(kwargs))
        return replace(self, template=template, _known={})

    # --- text and ids -------------------------------------------------------------------------------------

    @property
    def template_sha256(self) -> str | None:
        """Hash of the chat template's text; None for a model without one."""
        return self.template.sha256 if self.template else None

    @property
    def template_kwargs(self) -> dict[str, Scalar]:
        """What the template was given beside the messages."""
        return self.template.arguments if self.template else {}

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text as it stands: names of special tokens in it become these tokens, nothing is added."""
        return tuple(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self.inner.decode(list(ids), skip_special_tokens=False))

    def encode_chat(self, messages: Messages) -> tuple[int, ...]:
        """Ids of the prompt that asks for the answer to these messages."""
        key = orjson.dumps([dict(message) for message in messages])
        if key not in self._known:
            self._known[key] = self._encode_chat(messages)
        return self._known[key]

    def _encode_chat(self, messages: Messages) -> tuple[int, ...]:
        if self.template is None:
            raise SpecbenchError(f"model: it has no chat template, so it is a base model; {_MENDED}.")
        text = self.template.render(messages)
        if self.adds_bos:
            text = self.template.bos + text.removeprefix(self.template.bos)
        ids = self.encode(text)
        if not ids:
            raise SpecbenchError("workload: a prompt has no token at all; leave it out.")
        return ids


def for_model(name: str, kwargs: Mapping[str, Scalar]) -> Tokenizer:
    """The tokenizer of the model that a plan names: a catalogue name, a GGUF file or a Hugging Face folder.

    Raises SpecbenchError where the model's files are not here, as with a name that only a running server knows.
    """
    folder = Path(name).expanduser()
    try:
        path = folder if folder.is_dir() else resolve(name).path
    except SpecbenchError as error:
        raise SpecbenchError(
            f'{str(error).rstrip(".")}; workload.prompts = "ids" needs its tokenizer.'
        ) from None
    return Tokenizer.from_model(path).with_kwargs(kwargs)


# --- Hugging Face folders ---------------------------------------------------------------------------------


def _folder_template(folder: Path) -> ChatTemplate | None:
    """The template of a folder: `chat_template.jinja`, else what tokenizer_config.json holds."""
    config = _config(folder / "tokenizer_config.json")
    beside = folder / "chat_template.jinja"
    text = beside.read_text(encoding="utf-8") if beside.is_file() else config.get("chat_template")
    if isinstance(text, list):  # several by name; the one for plain chats is called default
        named = {entry.get("name"): entry.get("template") for entry in text if isinstance(entry, dict)}
        text = named.get("default")
    if not isinstance(text, str):
        return None
    return ChatTemplate(text, _token(config, "bos_token"), _token(config, "eos_token"))


def _config(path: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise SpecbenchError(f"model: {path} cannot be read ({error}).") from None
    return found if isinstance(found, dict) else {}


def _token(config: Mapping[str, Any], name: str) -> str:
    """A special token's text, which is written plainly or as a record."""
    found = config.get(name)
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else ""

"""The tokenizer that a GGUF file describes, built on the `tokenizers` package.

A file names its vocabulary's kind (`tokenizer.ggml.model`) and, for byte-level BPE, how text is split before merging
(`tokenizer.ggml.pre`). The expressions for the latter are the ones that llama.cpp uses under those names; each entry
of `PRE` was compared with llama.cpp's own /tokenize on real text (docs/measurements.md). A kind that was not is
refused by name, because a tokenizer that is nearly right measures other prompts than it says.

Boundary: a file in, a `tokenizers.Tokenizer` and a few facts out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from models_roofline.errors import RooflineError
from models_roofline.gguf_header import List, Value, read_header
from specbench.errors import SpecbenchError, Unsupported

_KEY = "tokenizer.ggml."
_LISTS = tuple(_KEY + name for name in ("tokens", "token_type", "merges", "scores"))

_SPECIAL = (2, 3, 4)
"""Token types (unknown, control, user-defined) that are found in text before anything is merged."""

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CASELESS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LETTERS = _CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = (_LETTERS + r"\p{N}{1,3}" + _REST,)
_QWEN2 = (_LETTERS + r"\p{N}" + _REST,)
_GPT2 = (_WORDS,)
_STARCODER = (r"\p{N}", _WORDS)
_CASED = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+"
_CAPITALS = r"|[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*"
_PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = (_CASED + _CASELESS + "?" + _CAPITALS + _CASELESS + r"?|\p{N}{1,3}" + _PATHS,)
_TEKKEN = (_CASED + _CAPITALS + r"|\p{N}" + _PATHS,)
_MARKS = r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")

PRE: Mapping[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "command-r": _STARCODER,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "qwen35": (_CASELESS + _MARKS,),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "tekken": _TEKKEN,
    "deepseek-v3": _DEEPSEEK3,
}
"""Name in the file to the expressions that cut text, applied one after the other."""

_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "falcon3", "tekken"})
"""Here a piece that is a token as a whole is taken as it is, and text begins with BOS unless the file denies it."""


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file says of its tokenizer. Raises SpecbenchError where it says too little."""

    file: str
    metadata: Mapping[str, Value]
    lists: Mapping[str, List]

    @classmethod
    def read(cls, path: Path) -> Vocabulary:
        """Read a file's vocabulary (0.3 s for 50,000 tokens)."""
        try:
            header = read_header(path, _LISTS)
        except RooflineError as error:
            raise SpecbenchError(f"model: {error}") from None
        if _KEY + "tokens" not in header.lists:
            raise SpecbenchError(
                f"model: {path.name} has no vocabulary; name a model file that has one, or set "
                'workload.prompts = "messages".'
            )
        kept = {key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")}
        name = header.metadata.get("general.name", "")
        return cls(path.name, kept | {"general.name": name}, header.lists)

    def get(self, name: str, default: Any = None) -> Any:
        """A value under `tokenizer.ggml.`."""
        return self.metadata.get(_KEY + name, default)

    @property
    def tokens(self) -> tuple[str, ...]:
        """Every token, in the order of its id."""
        return self.lists[_KEY + "tokens"]  # type: ignore[return-value]

    @property
    def types(self) -> tuple[int, ...]:
        """The type of every token; 1 (normal) where the file does not say."""
        return self.lists.get(_KEY + "token_type", (1,) * len(self.tokens))  # type: ignore[return-value]

    @property
    def kind(self) -> str:
        """`gpt2` for byte-level BPE, `llama` for SentencePiece."""
        return str(self.get("model", ""))

    @property
    def pre(self) -> str:
        """How text is cut before merging."""
        return str(self.get("pre", "default"))

    @property
    def adds_bos(self) -> bool:
        """Whether a prompt begins with BOS, whatever the template writes."""
        return bool(self.get("add_bos_token", self.kind == "llama" or self.pre in _WHOLE_WORDS))

    def special(self, name: str) -> str:
        """The text of the `bos` or `eos` token; empty where there is none."""
        index = self.get(f"{name}_token_id", {"bos": 1, "eos": 2}[name] if self.kind == "llama" else None)
        return self.tokens[index] if isinstance(index, int) and 0 <= index < len(self.tokens) else ""

    @property
    def chat_template(self) -> str | None:
        """The chat template's text."""
        found = self.metadata.get("tokenizer.chat_template")
        return found if isinstance(found, str) else None

    @cached_property
    def sha256(self) -> str:
        """Hash of everything here that decides ids; the chat template has a hash of its own."""
        settings = {key: value for key, value in self.metadata.items() if key != "tokenizer.chat_template"}
        parts = [settings, {key: self.lists[key] for key in sorted(self.lists)}]
        return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()

    # --- building -----------------------------------------------------------------------------------------

    def build(self) -> Tokenizer:
        """The tokenizer. Raises Unsupported for a kind that was not compared with llama.cpp."""
        makers = {"gpt2": self._byte_level, "llama": self._sentence_piece}
        if self.kind not in makers:
            raise self._refused(f"its tokenizer is of the kind {self.kind!r}", "gpt2 and llama are known")
        if self.get("add_eos_token", False):
            raise self._refused("its prompts end with an end token", "that is no model for chats")
        made = makers[self.kind]()
        # Not normalised: a control token stands in text as it is spelled or not at all.
        made.add_special_tokens(
            [
                AddedToken(token, normalized=False, special=True)
                for token, kind in zip(self.tokens, self.types, strict=True)
                if kind in _SPECIAL and token
            ]
        )
        return made

    def _refused(self, what: str, known: str) -> Unsupported:
        return Unsupported(
            "workload.prompts",
            f'{self.file}: {what}, which is not tokenised here ({known}); use prompts = "messages"',
        )

    def _byte_level(self) -> Tokenizer:
        if self.pre not in PRE:
            raise self._refused(f"it cuts text as {self.pre!r} does", f"known are {', '.join(PRE)}")
        merges = [tuple(str(merge).split(" ", 1)) for merge in self.lists.get(_KEY + "merges", ())]
        vocabulary = {token: index for index, token in enumerate(self.tokens)}
        made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=self.pre in _WHOLE_WORDS))  # type: ignore[arg-type]
        cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in PRE[self.pre]]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
        made.decoder = decoders.ByteLevel()
        return made

    def _sentence_piece(self) -> Tokenizer:
        if "phi-3" in str(self.metadata.get("general.name", "")).lower().replace("phi3", "phi-3"):
            raise self._refused("its special tokens swallow the space after them", "Phi-3 alone does that")
        vocabulary = {token: index for index, token in enumerate(self.tokens)}
        if not set("".join(self._pieces())) <= set(vocabulary):
            # llama.cpp merges characters that are no tokens themselves; the package cannot.
            raise self._refused(
                "its pieces hold characters that are no pieces", "SentencePiece makes them such"
            )
        unknown = self.tokens[self.get("unknown_token_id", 0)]
        made = Tokenizer(
            models.BPE(
                vocabulary,
                list(self._merges(vocabulary)),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        begin = [normalizers.Prepend("▁")] if self.get("add_space_prefix", True) else []
        made.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        return made

    def _pieces(self) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind == 1]

    def _merges(self, vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Pairs of tokens that make a token, best score first: what SentencePiece merges, and in which order."""
        scores = self.lists.get(_KEY + "scores", ())
        if len(scores) != len(self.tokens):
            raise self._refused("its vocabulary has no scores", "SentencePiece merges by them")
        order = {
            token: (-float(score), index)
            for index, (token, score) in enumerate(zip(self.tokens, scores, strict=True))
        }
        for token in sorted(self._pieces(), key=order.__getitem__):
            for cut in range(1, len(token)):
                if token[:cut] in vocabulary and token[cut:] in vocabulary:
                    yield token[:cut], token[cut:]

"""Our ids against llama.cpp's own, for every kind of tokenizer: `python -m tests.benchmarks.tokenizers_against_llama_cpp`.

The small catalogue model is written anew with another `tokenizer.ggml.pre` (or with a SentencePiece vocabulary made of
its tokens), llama.cpp loads it and tokenises a few hundred texts, and the same texts are tokenised here: as they stand
by /tokenize, and as a chat by /apply-template and /tokenize. So the vocabulary is always SmolLM2's, the rules are those
of the name. Takes some minutes and 200 MB of temporary disk; names may be given to check only those.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from runners.base import Where
from runners.gguf_tokenizer import PRE
from runners.llama_cpp import LlamaCppEngine
from runners.tokens import Tokenizer
from specbench import models
from specbench.cell import Config, EngineAsk, Method, Workload
from tests.token_texts import texts

Change = tuple[Any, GGUFValueType, GGUFValueType | None]
STRING, ARRAY, BOOL = GGUFValueType.STRING, GGUFValueType.ARRAY, GGUFValueType.BOOL
KEY = "tokenizer.ggml."


def rewrite(
    reader: GGUFReader, target: Path, changes: Mapping[str, Change], drop: tuple[str, ...] = ()
) -> None:
    """Write a model again with some metadata changed or left out."""
    target.unlink(missing_ok=True)
    writer = GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in {"general.architecture", *drop, *changes}:
            continue
        inner = field.types[-1] if field.types[0] == ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for name, (value, kind, inner) in changes.items():
        writer.add_key_value(name, value, kind, inner)
    for tensor in reader.tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(tensor.data)
    writer.close()


def sentence_piece(reader: GGUFReader, prefix: bool, bos: bool) -> dict[str, Change]:
    """Metadata of a SentencePiece vocabulary of the same size: bytes, then the model's tokens as pieces by rank."""
    tokens = reader.fields[KEY + "tokens"].contents()
    kinds = reader.fields[KEY + "token_type"].contents()
    plain = [text for token in tokens if (text := _as_piece(token))]
    single = {piece for piece in plain if len(piece) == 1 and piece != "\0"} | {"▁"}
    pieces = [p for p in dict.fromkeys(plain) if set(p) <= single and p not in tokens[:17]]
    made, types, scores = list(tokens), list(kinds), [0.0] * len(tokens)
    free = [i for i, kind in enumerate(kinds) if kind == 1]
    for byte, slot in enumerate(free[:256]):
        made[slot], types[slot] = f"<0x{byte:02X}>", 6
    left = free[256:]
    for rank, slot in enumerate(left):
        known = rank < len(pieces)
        made[slot], types[slot] = (pieces[rank], 1) if known else (f"[unused{slot}]", 5)
        scores[slot] = -float(rank) if known else 0.0
    return {
        KEY + "model": ("llama", STRING, None),
        KEY + "tokens": (made, ARRAY, STRING),
        KEY + "token_type": (types, ARRAY, GGUFValueType.INT32),
        KEY + "scores": (scores, ARRAY, GGUFValueType.FLOAT32),
        KEY + "add_space_prefix": (prefix, BOOL, None),
        KEY + "add_bos_token": (bos, BOOL, None),
    }


def _as_piece(token: str) -> str | None:
    """A byte-level token as text with SentencePiece's space; None where it is no whole text."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    try:
        return bytes(table[sign] for sign in token).decode().replace(" ", "▁")
    except (KeyError, UnicodeDecodeError):
        return None


def compare(path: Path) -> tuple[int, int, int]:
    """Texts, and how many differ as text and as a chat."""
    engine, tokenizer = LlamaCppEngine(), Tokenizer.from_gguf(path)
    ask = EngineAsk(name="llamacpp", args={"context": 64})
    config = Config(engine=ask, model=str(path), method=Method(name="none"), workload=Workload())
    version = engine.probe(Where()).version or "?"
    wrong = wrong_chats = 0
    with (
        engine.start(engine.launch(config, version), path.with_suffix(".log")) as session,
        httpx.Client(base_url=session.address, timeout=60) as http,
    ):
        for text in texts():
            wrong += tokenizer.encode(text) != _tokenize(http, text, False)
            messages = [{"role": "user", "content": text}]
            prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
            wrong_chats += tokenizer.encode_chat(messages) != _tokenize(http, prompt, True)
    return len(texts()), wrong, wrong_chats


def _tokenize(http: httpx.Client, text: str, add_special: bool) -> tuple[int, ...]:
    ask = {"content": text, "add_special": add_special, "parse_special": True}
    return tuple(http.post("/tokenize", json=ask).json()["tokens"])


def main() -> None:
    """Print a row for each kind asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "kinds", nargs="*", help="names of tokenizer.ggml.pre, or spm; all of them by default"
    )
    asked = parser.parse_args().kinds or [*PRE, "spm"]
    reader = GGUFReader(models.fetch("smollm2-135m"))
    print(f"{'kind':<28}{'texts':>7}{'differ':>8}{'chats differ':>14}")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.gguf"
        for name in asked:
            for label, changes in _variants(reader, name):
                drop = (KEY + "merges", KEY + "pre") if name == "spm" else ()
                rewrite(reader, path, changes, drop)
                total, wrong, chats = compare(path)
                print(f"{label:<28}{total:>7}{wrong:>8}{chats:>14}", flush=True)


def _variants(reader: GGUFReader, name: str) -> list[tuple[str, dict[str, Change]]]:
    if name != "spm":
        pre: dict[str, Change] = {KEY + "pre": (name, STRING, None)}
        template = reader.fields["tokenizer.chat_template"].contents()
        bos: dict[str, Change] = {
            KEY + "add_bos_token": (True, BOOL, None),
            "tokenizer.chat_template": ("{{ bos_token }}" + template, STRING, None),
        }
        return [(name, pre), (f"{name}, BOS in template", pre | bos)] if name == "smollm" else [(name, pre)]
    return [
        ("spm", sentence_piece(reader, True, False)),
        ("spm, BOS", sentence_piece(reader, True, True)),
        ("spm, no space prefix", sentence_piece(reader, False, False)),
    ]


if __name__ == "__main__":
    main()

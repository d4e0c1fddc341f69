"""runners.gguf: what a model's header says, and that a base model is refused before a server starts."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from runners.gguf import has_chat_template, weight_bytes
from runners.llama_cpp import LlamaCppEngine
from specbench.cell import Config, EngineAsk, Method, Workload
from specbench.errors import SpecbenchError


def header(path: Path, *keys: str) -> Path:
    """A GGUF file of metadata alone: each key with a string value."""
    pairs = [struct.pack("<Q", len(k)) + k.encode() + struct.pack("<IQ", 8, 1) + b"x" for k in keys]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs))
    return path


def config(path: Path) -> Config:
    ask = EngineAsk(name="llamacpp")
    return Config(engine=ask, model=str(path), method=Method(name="none"), workload=Workload())


def test_chat_template_is_a_whole_key(tmp_path: Path) -> None:
    assert has_chat_template(header(tmp_path / "a", "general.name", "tokenizer.chat_template"))
    other = header(tmp_path / "b", "general.name", "tokenizer.chat_template.tool_use")
    assert has_chat_template(other) is False


def test_a_file_that_is_no_gguf_says_nothing(tmp_path: Path) -> None:
    for name, data in (("empty", b""), ("short", b"GGUF"), ("other", b"x" * 100)):
        (tmp_path / name).write_bytes(data)
        assert has_chat_template(tmp_path / name) is None
        assert weight_bytes(tmp_path / name) is None


def test_a_step_reads_all_weights_of_a_dense_model_only(tmp_path: Path) -> None:
    dense = header(tmp_path / "dense", "llama.block_count")
    assert weight_bytes(dense) == dense.stat().st_size
    assert weight_bytes(header(tmp_path / "moe", "qwen3moe.expert_count")) is None


def test_a_base_model_is_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp serves a base model with a template of its own choice and does not say so."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    base = header(tmp_path / "base.gguf", "general.name")
    with pytest.raises(SpecbenchError, match=r"^model: .*base\.gguf has no chat template.* instruct model"):
        LlamaCppEngine().launch(config(base), "1")
    instruct = header(tmp_path / "instruct.gguf", "tokenizer.chat_template")
    launch = LlamaCppEngine().launch(config(instruct), "1")
    assert launch.facts.extra["weight_bytes"] == instruct.stat().st_size

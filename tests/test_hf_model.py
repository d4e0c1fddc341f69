"""runners.hf_model: where a folder lies, what it says of itself, and the small model written and read back."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from runners import environments, hf_model, tokens
from specbench.errors import SpecbenchError
from specbench.models import ModelFile, cache_dir, resolve
from tests.fake_environment import environment


def folder_with(path: Path, config: object, sizes: dict[str, int]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for name, size in sizes.items():
        (path / name).write_bytes(bytes(size))
    return path


def test_a_model_of_the_cache_has_its_folder_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    inside = ModelFile(tmp_path / "models" / "small" / "Small.gguf", "ab" * 32, "small")
    assert hf_model.place_of(inside) == tmp_path / "models" / "small" / "hf-abababababababab"
    outside = ModelFile(Path("/data/My model (1).gguf"), "cd" * 32, "/data/My model (1).gguf")
    assert hf_model.place_of(outside) == tmp_path / "models" / "My-model-1-" / "hf-cdcdcdcdcdcdcdcd"


def test_weight_bytes(tmp_path: Path) -> None:
    sizes = {"a.safetensors": 30, "b.safetensors": 12, "tokenizer.json": 99}
    assert hf_model.weight_bytes(folder_with(tmp_path / "dense", {"vocab_size": 8}, sizes)) == 42
    # Of experts a step reads some, so the size says nothing.
    for config in ({"num_local_experts": 8}, {"text_config": {"n_routed_experts": 64}}):
        path = folder_with(tmp_path / next(iter(config)), config, sizes)
        assert hf_model.weight_bytes(path) is None
    assert hf_model.weight_bytes(tmp_path) is None


def test_the_hash_is_of_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    one = folder_with(tmp_path / "one", {}, {"a.safetensors": 8, "tokenizer.json": 1})
    same = folder_with(tmp_path / "same", {}, {"a.safetensors": 8})
    renamed = folder_with(tmp_path / "renamed", {}, {"b.safetensors": 8})
    other = folder_with(tmp_path / "other", {"tie": 1}, {"a.safetensors": 8})
    hashes = [hf_model.weights_sha256(path) for path in (one, same, renamed, other)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
    with pytest.raises(SpecbenchError, match="holds no weights"):
        hf_model.weights_sha256(folder_with(tmp_path / "empty", {}, {}))


def test_an_interpreter_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    python = environment(tmp_path / "bare", {})
    with pytest.raises(
        SpecbenchError, match=r"^model: tiny\.gguf could not be written .*No module named 'torch'"
    ):
        hf_model.hf_folder(resolve(str(file)), python)
    assert not list((tmp_path / "cache" / "models" / "tiny").iterdir())


@pytest.mark.engine
@pytest.mark.slow
def test_the_small_model(model: str) -> None:
    """The folder of the cache, made now where it is missing: weights, tokenizer and template are the file's."""
    python = environments.installed_python("vllm") or environments.installed_python("transformers")
    if python is None or not all(environments.version_in(python, (name,)) for name in ("gguf", "accelerate")):
        pytest.skip("no engine environment here has transformers with gguf and accelerate")
    file = resolve(model)
    folder = hf_model.hf_folder(file, python)
    assert folder.parent == cache_dir() / "models" / "smollm2-135m"
    record = hf_model.record_of(folder)
    assert record["gguf_sha256"] == file.sha256
    assert record["weights_sha256"] == hf_model.weights_sha256(folder)
    # 134,515,008 parameters with the embedding stored once, two bytes each, and a header.
    assert record["parameters"] == 134_515_008
    (weights,) = folder.glob("*.safetensors")
    with weights.open("rb") as data:
        (header,) = struct.unpack("<Q", data.read(8))
    assert weights.stat().st_size - 8 - header == 2 * 134_515_008
    ours, theirs = tokens.Tokenizer.from_gguf(file.path), tokens.Tokenizer.from_folder(folder)
    for text in (
        "½ ² ٣ x1",
        "Hello  world 1234 émoji 🎉",
        "<|im_start|>user\nhi<|im_end|>\n",
        "日本語 と 漢字",
    ):
        assert theirs.encode(text) == ours.encode(text)
    messages = [{"role": "user", "content": "hi"}]
    assert theirs.encode_chat(messages) == ours.encode_chat(messages)

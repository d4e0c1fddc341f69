"""Configs → architectures: published totals to the last digit, windows, errors that name the field."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from models_roofline.architecture import Architecture
from models_roofline.errors import RooflineError
from models_roofline.families import catalogue, from_config, load_config, load_model

DATA = Path(__file__).parent / "data" / "roofline" / "configs"
MODELS = Path(__file__).parent.parent / "models_roofline" / "data" / "models"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text())
EXPECTED.pop("_source")
DEGENERATE = json.loads((DATA / "degenerate.json").read_text())["configs"]
TOTALS = pd.read_csv(DATA / "totals.csv", comment="#")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
}


def config(**changes: Any) -> dict[str, Any]:
    return {**LLAMA, **changes}


def shipped(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    return fields


def windows(arch: Architecture) -> dict[int | None, int]:
    """Number of layers by window."""
    found: dict[int | None, int] = {}
    for layer in arch.layers:
        assert layer.attention is not None
        found[layer.attention.window] = found.get(layer.attention.window, 0) + layer.count
    return found


def refused(fields: dict[str, Any]) -> str:
    with pytest.raises(RooflineError) as caught:
        from_config(fields, "m")
    return str(caught.value)


# ------------------------------------------------------------------ published counts


@pytest.mark.parametrize("name", EXPECTED)
def test_parameters_are_the_published_ones(name: str) -> None:
    arch, want = load_model(name), EXPECTED[name]
    assert arch.total_params == want["total"]
    assert arch.active_params == want["active_incl_embed"]
    assert arch.streamed_params == want["decode_weight_read"]
    assert arch.embedding.params == want["embed"]
    assert arch.tied is want["tied"]
    untied = 0 if arch.tied else arch.head.params
    assert untied == want["lm_head_extra"]
    assert arch.active_params - untied == want["active_excl_input_embed"]
    assert arch.routed_params == want.get("routed", 0)


@pytest.mark.parametrize("name", EXPECTED)
def test_cache_bytes_are_the_expected_ones(name: str) -> None:
    arch, want = load_model(name), EXPECTED[name]
    assert arch.kv_bytes_per_token() == want["kv_bytes_per_token_bf16"]
    if "window" in want:
        assert windows(arch) == {None: want["full_layers"], want["window"]: want["sliding_layers"]}
        assert arch.kv_bytes_per_token_beyond_window() == want["kv_growth_beyond_window"]
    for key, value in want.items():
        if key.startswith("kv_bytes_ctx_"):
            assert arch.kv_bytes(int(key.removeprefix("kv_bytes_ctx_"))) == value


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in ("gpt-oss-20b", "deepseek-v3")])
def test_two_bytes_a_parameter(name: str) -> None:
    assert load_model(name).weight_bytes == EXPECTED[name]["weights_bytes_bf16"]


@pytest.mark.parametrize(("name", "total"), list(zip(TOTALS["model"], TOTALS["total"], strict=True)))
def test_totals_of_the_catalogue(name: str, total: int) -> None:
    assert load_model(name).total_params == total


def test_active_counts_that_others_published() -> None:
    # OLMoE: 1,282,017,280 by the OLMoE code; model cards round 22B, 35B, 2.7B, 21B, 39B.
    assert load_model("olmoe-1b-7b").active_params == 1_282_017_280
    rounded = {
        "qwen3-235b-a22b": 22e9,
        "qwen3-coder-480b-a35b": 35e9,
        "qwen1.5-moe-a2.7b": 2.7e9,
        "deepseek-v2": 21e9,
        "mixtral-8x22b": 39e9,
    }
    for name, active in rounded.items():
        assert load_model(name).active_params == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("name", "hub"),
    [
        ("gemma-3-4b-it", 4_300_079_472),
        ("gemma-3-12b-it", 12_187_325_040),
        ("gemma-3-27b-it", 27_432_406_640),
    ],
)
def test_text_and_vision_make_the_hub_total(name: str, hub: int) -> None:
    arch = load_model(name)
    assert arch.total_params + (arch.vision_params or 0) == hub


def test_gpt_oss_bytes_of_its_mxfp4_checkpoint() -> None:
    arch = load_model("gpt-oss-20b")
    assert arch.weight_bytes == 13_761_264_768
    assert arch.streamed_bytes == 3_708_083_328


# ------------------------------------------------------------------ DeepSeek


def by_compute(arch: Architecture, compute: str) -> tuple[int, int]:
    """Parameters and bytes of the matrices that are multiplied in `compute`, prediction modules included."""
    params = stored = 0
    for layer in (*arch.layers, *arch.mtp):
        groups = [(layer.count, layer.matrices)]
        if layer.experts:
            groups.append((layer.count * layer.experts.number, layer.experts.matrices))
        for times, matrices in groups:
            params += times * sum(m.params for m in matrices if m.compute == compute)
            stored += times * sum(m.bytes for m in matrices if m.compute == compute)
    return params, stored


def test_deepseek_v3_checkpoint_part_by_part() -> None:
    """The hub's metadata: 680,571,043,840 F8 values, 41,555,600 F32 (scales and router biases), 684,531,386,000 in all."""
    arch = load_model("deepseek-v3")
    quantised, stored = by_compute(arch, "fp8")
    scales = (stored - quantised) // 4
    assert (quantised, scales) == (680_571_043_840, 41_540_496)
    assert arch.mtp_params == 13_463_426_304
    assert arch.total_params + arch.mtp_params + scales == 684_531_386_000
    router_biases = 256 * sum(layer.count for layer in (*arch.layers, *arch.mtp) if layer.experts)
    assert scales + router_biases == 41_555_600


def test_deepseek_v3_modules_hold_copies_of_both_tables() -> None:
    arch = load_model("deepseek-v3")
    (module,) = arch.mtp
    assert arch.mtp_params == module.total_params + arch.embedding.params + arch.head.params
    assert module.matrices[0].name == "eh_proj"


def test_latent_cache() -> None:
    arch = load_model("deepseek-v3")
    attention = arch.layers[0].attention
    assert attention is not None
    assert (attention.values_per_token, attention.key_dim, attention.value_dim) == (576, 576, 512)
    # Two FLOPs for each of 128 heads and of 576 + 512 dimensions.
    assert attention.flops_per_pair == 278_528
    assert load_model("kimi-k2").kv_bytes_per_token() == 70_272


def test_v2_lite_projects_q_directly() -> None:
    names = [matrix.name for matrix in load_model("deepseek-v2-lite").layers[0].matrices]
    assert names == ["q", "kv_a", "kv_b", "o", "gate_up", "down"]


def test_first_layers_are_dense() -> None:
    arch = load_model("deepseek-v3")
    assert [(layer.count, layer.experts is None) for layer in arch.layers] == [(3, True), (58, False)]


# ------------------------------------------------------------------ windows


def test_mistral_has_its_window_on_all_layers_or_on_none() -> None:
    assert windows(load_model("mistral-7b-v0.1")) == {4096: 32}
    assert windows(load_model("mistral-7b-v0.3")) == {None: 32}
    absent = from_config(config(model_type="mistral"), "m")
    assert windows(absent) == {4096: 4}
    assert any("sliding_window = 4096" in note for note in absent.notes)


def test_qwen_window_counts_only_where_it_is_used() -> None:
    fields = config(model_type="qwen2", sliding_window=16, max_window_layers=3)
    assert windows(from_config({**fields, "use_sliding_window": False}, "m")) == {None: 4}
    assert windows(from_config({**fields, "use_sliding_window": True}, "m")) == {None: 3, 16: 1}


def test_layer_types_come_before_the_pattern() -> None:
    kinds = ["full_attention", "full_attention", "full_attention", "sliding_attention"]
    fields = config(model_type="gemma2", head_dim=8, sliding_window=16)
    assert windows(from_config(fields, "m")) == {16: 2, None: 2}
    assert windows(from_config({**fields, "layer_types": kinds}, "m")) == {None: 3, 16: 1}


# ------------------------------------------------------------------ defaults and errors


def test_null_and_absent_are_the_same() -> None:
    null = from_config(DEGENERATE["kv_heads_null"], "m")
    absent = {k: v for k, v in DEGENERATE["kv_heads_null"].items() if v is not None}
    assert null == from_config(absent, "m")
    assert null.layers[0].attention is not None
    assert null.layers[0].attention.kv_heads == 32


def test_head_dim_is_derived_and_said() -> None:
    arch = from_config(DEGENERATE["head_dim_null"], "m")
    assert arch.layers[0].attention is not None
    assert arch.layers[0].attention.key_dim == 128
    assert "head_dim = 128 (hidden_size / num_attention_heads)" in arch.notes[0]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("not_divisible", ["head_dim is absent", "2880", "56"]),
        ("unknown_model_type", ["'brandnew'", "llama", "intermediate_size", "vocab_size"]),
        ("layer_types_len_mismatch", ["layer_types", "4", "2"]),
    ],
)
def test_degenerate_configs_are_refused_in_words(case: str, words: list[str]) -> None:
    sentence = refused(DEGENERATE[case])
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "64"}, "hidden_size must be a whole number of at least 1, not '64'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a whole number of at least 1, not -1"),
        ({"vocab_size": True}, "vocab_size must be a whole number of at least 1, not True"),
        ({"intermediate_size": 0}, "intermediate_size must be a whole number of at least 1, not 0"),
        ({"num_attention_heads": 8.0}, "num_attention_heads must be a whole number"),
        ({"num_hidden_layers": 10**12}, "at most 10000"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"torch_dtype": "int3"}, "torch_dtype 'int3' is not known here"),
        ({"vocab_size": None}, "vocab_size is missing and has no default"),
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": "lama"}, "did you mean llama"),
        ({"text_config": [1]}, "text_config must be an object of fields"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "there are 2 experts"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"] * 3 + ["odd"]}, "holds 'odd'"),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, Any], words: str) -> None:
    sentence = refused(config(**changes))
    assert sentence.startswith("m: ")
    assert words in sentence


def test_nested_fields_are_named_with_their_section() -> None:
    fields = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": "big"}}
    assert "text_config.hidden_size must be" in refused(fields)


def test_a_known_wrapper_does_not_vouch_for_an_unknown_text_model() -> None:
    assert "'brandnew'" in refused({"model_type": "gemma3", "text_config": {"model_type": "brandnew"}})


def test_sparse_config_says_what_it_took_from_the_class() -> None:
    (note, *_) = load_model("gemma-3-4b-it").notes
    for filled in ("num_attention_heads = 8", "num_key_value_heads = 4", "head_dim = 256"):
        assert f"text_config.{filled}" in note
    assert "text_config.vocab_size = 262208" in note


def test_dtype_under_either_name_and_at_either_level() -> None:
    half = from_config(config(torch_dtype="float16"), "m")
    assert from_config(config(torch_dtype=None, dtype="float16"), "m") == half
    single = from_config(config(torch_dtype="float32"), "m")
    assert single.weight_bytes == 2 * half.weight_bytes == 4 * half.total_params
    nested = {
        "model_type": "gemma3",
        "dtype": "float32",
        "text_config": shipped("gemma-3-4b-it")["text_config"],
    }
    arch = from_config(nested, "m")
    assert arch.weight_bytes == 4 * arch.total_params


def mutations(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each field gone or wrong, one at a time, nested ones too."""
    for key, value in fields.items():
        yield {k: v for k, v in fields.items() if k != key}
        for wrong in (None, "x", -1, 0, True, 1.5, [], {}, 10**15, ["a"]):
            yield {**fields, key: wrong}
        if isinstance(value, dict):
            for inner in mutations(value):
                yield {**fields, key: inner}


ONE_OF_EACH_FAMILY = {shipped(name)["model_type"]: name for name in catalogue()}


@pytest.mark.parametrize("name", list(ONE_OF_EACH_FAMILY.values()), ids=list(ONE_OF_EACH_FAMILY))
def test_a_broken_config_raises_nothing_else(name: str) -> None:
    for fields in mutations(shipped(name)):
        with contextlib.suppress(RooflineError):
            assert from_config(fields, "m").total_params > 0


# ------------------------------------------------------------------ finding a model


def test_every_shipped_config_loads_and_names_its_source() -> None:
    assert len(catalogue()) > 60
    for name in catalogue():
        arch = load_model(name)
        assert arch.name == name
        assert arch.streamed_params <= arch.active_params <= arch.total_params
        assert "/" in shipped(name)["_source"]


def test_a_model_is_found_by_path_too(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for path in (folder, folder / "config.json", str(folder)):
        assert load_model(path) == from_config(LLAMA, "my-model")
    other = tmp_path / "tiny.json"
    other.write_text(json.dumps(LLAMA))
    assert load_config(other).name == "tiny"


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(RooflineError, match=r"--model: 'llama-3.1-8' .* did you mean llama-3.1-8b"):
        load_model("llama-3.1-8")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"\xff\xfe", "cannot be read as text"),
        (b"{}", "model_type is missing"),
    ],
)
def test_an_unreadable_config_is_a_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(RooflineError, match=words):
        load_model(path)


def test_a_folder_without_config_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RooflineError, match=r"there is no .*config\.json"):
        load_model(tmp_path)

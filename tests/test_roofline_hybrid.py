"""Linear attention, state spaces, mixed stacks, Llama 4, GLM and vision towers against published parameter counts.

Totals are those that Hugging Face shows for a checkpoint (its safetensors metadata), which hold prediction modules
and vision towers too; where a comment says so they come from elsewhere.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_roofline.architecture import Architecture
from models_roofline.errors import RooflineError
from models_roofline.families import from_config, load_model

PUBLISHED = {
    "qwen3-coder-next": 79_674_391_296,
    "qwen3-next-80b-a3b": 81_324_862_720,
    "qwen3.5-9b": 9_653_104_368,
    "qwen3.5-397b-a17b": 403_397_928_944,
    "qwen3.6-27b": 27_781_427_952,
    "qwen3.6-35b-a3b": 35_951_822_704,
    "mamba-130m": 129_135_360,
    "mamba-2.8b": 2_768_345_600,
    # Summed over transformers' Mamba2ForCausalLM of these sizes.
    "mamba2-130m": 128_989_632,
    "mamba2-2.7b": 2_702_599_680,
    "nemotron-nano-9b-v2": 8_888_227_328,
    # The hub's figure leaves out what is stored in fp32: a correction for each of 128 experts in 23 layers.
    "nemotron-3-nano-30b-a3b": 31_577_937_344 + 23 * 128,
    # All tensors; the hub shows 123,611,012,096, which leaves out 41 × 512 corrections.
    "nemotron-3-super-120b-a12b": 123_611_033_088,
    "glm-4.5-air": 110_468_824_832,
    "glm-4.5": 358_337_791_296,
    "llama-4-scout": 108_641_793_536,
    "llama-4-maverick": 401_583_781_376,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_text_model_prediction_module_and_tower_make_the_published_total(name: str) -> None:
    arch = load_model(name)
    assert arch.total_params + arch.mtp_params + (arch.vision_params or 0) == PUBLISHED[name]


def test_text_totals_that_are_published_on_their_own() -> None:
    # INTELLECT-3 is GLM-4.5-Air without its prediction module; Qwen3.5-397B's parts are from a count of its tensors.
    assert load_model("glm-4.5-air").total_params == 106_852_251_264
    large = load_model("qwen3.5-397b-a17b")
    assert (large.total_params, large.vision_params, large.mtp_params) == (
        396_346_350_336,
        456_010_480,
        6_595_568_128,
    )


def test_active_counts() -> None:
    # Both figures leave the router's corrections out, of which Qwen has none.
    assert load_model("qwen3-coder-next").active_params == 3_874_929_408
    assert load_model("nemotron-3-super-120b-a12b").active_params - 40 * 512 == 12_770_216_960
    for name, billions in (("llama-4-scout", 17), ("llama-4-maverick", 17), ("qwen3.5-397b-a17b", 17)):
        assert round(load_model(name).active_params / 1e9) == billions


def test_delta_net_state_of_qwen3_next() -> None:
    arch = load_model("qwen3-next-80b-a3b")
    recurrent, convolution = 32 * 128 * 128 * 4, 4 * (2 * 16 * 128 + 32 * 128) * 2
    assert arch.state_bytes == 36 * (recurrent + convolution)
    assert 36 * recurrent == 75_497_472
    # As much as about 3.1 thousand tokens of the twelve full layers, whose cache alone grows.
    assert arch.kv_bytes_per_token() == 12 * 2 * (256 + 256) * 2
    assert round(36 * recurrent / arch.kv_bytes_per_token()) == 3072
    (linear,) = (layer for layer in arch.layers if layer.state)
    assert linear.count == 36
    assert linear.attention is None
    assert linear.state
    assert linear.state.flops_per_token == 7 * 32 * 128 * 128 + 2 * 4 * 8192


def test_gated_attention_doubles_the_queries() -> None:
    (full,) = (layer for layer in load_model("qwen3-next-80b-a3b").layers if layer.attention)
    qkv = next(each for each in full.matrices if each.name == "qkv")
    assert qkv.n == 2 * 16 * 256 + 2 * 2 * 256


def test_state_spaces_have_a_state_and_no_cache() -> None:
    mamba, mamba2 = load_model("mamba-130m"), load_model("mamba2-130m")
    # mamba-130m is stored in fp32, and so is its convolution's state; mamba2-130m in bf16.
    assert mamba.state_bytes == 24 * (1536 * 16 * 4 + 1536 * 4 * 4)
    assert mamba2.state_bytes == 24 * (1536 * 128 * 4 + (1536 + 2 * 128) * 4 * 2)
    for arch in (mamba, mamba2):
        assert arch.kv_bytes_per_token() == 0
        assert arch.kv_bytes(131_072) == 0
        assert arch.tied


def test_nemotron_3_experts_have_two_matrices_in_the_latent_space() -> None:
    arch = load_model("nemotron-3-super-120b-a12b")
    counts = {
        "M": sum(each.count for each in arch.layers if each.state),
        "E": sum(each.count for each in arch.layers if each.experts),
        "*": sum(each.count for each in arch.layers if each.attention),
    }
    assert counts == {"M": 40, "E": 40, "*": 8}
    experts = next(each.experts for each in arch.layers if each.experts)
    assert experts.params_per_expert == 2 * 1024 * 2688
    assert (experts.number, experts.top_k) == (512, 22)


def test_a_prediction_module_is_one_layer_with_its_projection() -> None:
    for name in ("nemotron-3-super-120b-a12b", "glm-4.5", "qwen3-next-80b-a3b", "qwen3.5-9b"):
        arch = load_model(name)
        (module,) = arch.mtp
        assert module.matrices[0].name == "eh_proj"
        assert module.matrices[0].params == 2 * arch.hidden**2
        assert module.attention is not None
        assert (module.experts is None) == (name == "qwen3.5-9b")


def test_llama_4_layers() -> None:
    scout, maverick = load_model("llama-4-scout"), load_model("llama-4-maverick")
    for arch in (scout, maverick):
        chunked = [each for each in arch.layers if each.attention and each.attention.chunked]
        assert sum(each.count for each in chunked) == 36
        assert {each.attention.window for each in chunked if each.attention} == {8192}
        assert arch.kv_bytes_per_token_beyond_window() == 12 * 2 * 8 * 128 * 2
    assert all(each.experts for each in scout.layers)
    assert sum(each.count for each in maverick.layers if each.experts) == 24


def test_quantised_checkpoints_keep_what_they_list() -> None:
    fields = _config("nemotron-3-nano-30b-a3b")
    fields["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    arch, plain = from_config(fields, "fp8"), load_model("nemotron-3-nano-30b-a3b")
    experts = next(each.experts for each in arch.layers if each.experts)
    assert experts.bytes_per_expert == experts.params_per_expert
    assert arch.head.bytes == plain.head.bytes
    assert arch.total_params == plain.total_params


TOWERS: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen2.5-VL-7B": (
        8_292_166_656,
        {
            "model_type": "qwen2_5_vl",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "in_chans": 3,
                "out_hidden_size": 3584,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        },
    ),
    "Qwen3-VL-8B": (
        8_767_123_696,
        {
            "model_type": "qwen3_vl",
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_text",
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 151936,
            },
            "vision_config": {
                "deepstack_visual_indexes": [8, 16, 24],
                "depth": 27,
                "hidden_size": 1152,
                "in_channels": 3,
                "intermediate_size": 4304,
                "num_position_embeddings": 2304,
                "out_hidden_size": 4096,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        },
    ),
}


@pytest.mark.parametrize("name", TOWERS)
def test_vision_towers_of_qwen(name: str) -> None:
    total, fields = TOWERS[name]
    arch = from_config(fields, name)
    assert arch.total_params + (arch.vision_params or 0) == total


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("gemma-3-4b-it", 4_300_079_472),
        ("gemma-3-12b-it", 12_187_325_040),
        ("gemma-3-27b-it", 27_432_406_640),
    ],
)
def test_vision_tower_of_gemma_3(name: str, total: int) -> None:
    arch = load_model(name)
    assert arch.total_params + (arch.vision_params or 0) == total
    assert arch.vision_params is not None
    # One tower for all sizes; only the matrix to the text model differs.
    assert arch.vision_params - 1152 * arch.hidden == 419_816_304 - 1152 * 2560


def test_a_tower_that_cannot_be_counted_leaves_the_text_model_alone() -> None:
    fields = _config("llama-4-scout")
    del fields["vision_config"]["projector_input_dim"]
    arch = from_config(fields, "broken")
    assert arch.vision_params is None
    assert any("vision_config.projector_input_dim" in note for note in arch.notes)
    assert arch.total_params == load_model("llama-4-scout").total_params


def _config(name: str) -> dict[str, Any]:
    """The fields of a shipped config, free to change."""
    file = resources.files("models_roofline") / "data" / "models" / f"{name}.json"
    fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return fields


def test_null_is_the_same_as_absent() -> None:
    for name, key in (("qwen3-coder-next", "linear_num_key_heads"), ("mamba-130m", "time_step_rank")):
        assert from_config(_config(name) | {key: None}, "x").total_params == load_model(name).total_params


def test_layers_listed_by_name() -> None:
    fields, names = _config("nemotron-nano-9b-v2"), {"M": "mamba", "-": "mlp", "*": "attention"}
    pattern = fields.pop("hybrid_override_pattern")
    fields["layers_block_type"] = [names[letter] for letter in pattern]
    assert from_config(fields, "x").layers == load_model("nemotron-nano-9b-v2").layers


def _without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        for key in keys:
            del fields[key]

    return change


def _with(**values: object) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        fields.get("text_config", fields).update(values)

    return change


REFUSED = [
    ("nemotron-nano-9b-v2", _without("hybrid_override_pattern"), "hybrid_override_pattern is missing"),
    ("nemotron-nano-9b-v2", _with(num_hidden_layers=55), "num_hidden_layers is 55"),
    ("nemotron-nano-9b-v2", _with(hybrid_override_pattern="M-X"), "must be made of M"),
    ("nemotron-nano-9b-v2", _with(layers_block_type=["mamba", ["mlp"]]), "layers_block_type must list"),
    ("nemotron-nano-9b-v2", _with(mamba_ssm_cache_dtype="int3"), "mamba_ssm_cache_dtype 'int3' is not known"),
    ("nemotron-3-nano-30b-a3b", _without("n_routed_experts"), "n_routed_experts"),
    ("nemotron-3-nano-30b-a3b", _with(num_experts_per_tok=129), "129, but there are 128 experts"),
    ("nemotron-3-super-120b-a12b", _with(mtp_hybrid_override_pattern="**E"), "a kind of layer twice"),
    ("mamba2-130m", _with(num_heads=25), "num_heads 25"),
    ("mamba-130m", _with(time_step_rank="wide"), "time_step_rank must be a whole number"),
    ("qwen3-next-80b-a3b", _with(linear_num_value_heads=33), "linear_num_value_heads 33 is not a multiple"),
    ("qwen3-next-80b-a3b", _with(layer_types=["full_attention"]), "layer_types must list 48 layers"),
    ("qwen3-next-80b-a3b", _with(mtp_use_dedicated_embeddings=True), "mtp_use_dedicated_embeddings"),
    ("qwen3.5-9b", _with(attn_output_gate=False), "attn_output_gate"),
    ("llama-4-scout", _with(no_rope_layers=[1, 0]), "no_rope_layers must list 48 layers"),
    ("llama-4-scout", _with(attention_chunk_size="8192"), "attention_chunk_size must be a whole number"),
    ("glm-4.5", _without("moe_intermediate_size"), "moe_intermediate_size is missing"),
]


@pytest.mark.parametrize(("name", "change", "words"), REFUSED)
def test_wrong_configs_are_refused_in_words(
    name: str, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    fields = _config(name)
    change(fields)
    with pytest.raises(RooflineError, match=words):
        from_config(fields, name)


def test_chunks_can_be_switched_off() -> None:
    fields = _config("llama-4-scout")
    fields["text_config"]["attention_chunk_size"] = None
    arch = from_config(fields, "unchunked")
    assert arch.kv_bytes_per_token() == arch.kv_bytes_per_token_beyond_window()


@given(st.text("M*-E", min_size=1, max_size=12))
def test_a_stack_is_the_sum_of_its_layers(pattern: str) -> None:
    def build(letters: str) -> Architecture:
        fields = _config("nemotron-3-nano-30b-a3b")
        fields.update(hybrid_override_pattern=letters, num_hidden_layers=None)
        return from_config(fields, letters)

    def body(arch: Architecture) -> int:
        return sum(each.count * each.total_params for each in arch.layers)

    whole = build(pattern)
    assert whole.n_layers == len(pattern)
    assert len(whole.layers) == len(set(pattern))
    assert body(whole) == sum(n * body(build(letter)) for letter, n in Counter(pattern).items())

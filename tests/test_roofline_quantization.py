"""`quantization_config` → how each module is stored, and `with_weights`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models_roofline.architecture import Architecture, Layer, Matrix
from models_roofline.errors import RooflineError
from models_roofline.families import from_config, load_config, load_model
from models_roofline.formats import FORMATS, int4
from models_roofline.quantization import with_weights
from models_roofline.speedup import predict

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}
MOE: dict[str, Any] = {
    **BASE,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def built(quantization: dict[str, Any], base: dict[str, Any] = BASE) -> Architecture:
    return from_config({**base, "quantization_config": quantization}, "m")


def bits(matrix: Matrix) -> float:
    return 8 * matrix.bytes / matrix.params


def named(layer: Layer, name: str) -> Matrix:
    return next(matrix for matrix in layer.matrices if matrix.name == name)


@pytest.mark.parametrize(
    ("quantization", "want", "compute"),
    [
        ({"quant_method": "fp8"}, 8, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, 8, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128, "bf16"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64}, 8 + 24 / 64, "bf16"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4, "bf16"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5, "bf16"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            4.125,
            "bf16",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, 4.5, "fp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8, "fp8"),
    ],
)
def test_methods(quantization: dict[str, Any], want: float, compute: str) -> None:
    arch = built(quantization)
    for matrix in arch.layers[0].matrices:
        assert (bits(matrix), matrix.compute) == (pytest.approx(want), compute)
    assert (bits(arch.embedding), bits(arch.head)) == (16, 16)
    assert arch.layers[0].vector_bytes == 2 * arch.layers[0].vectors


@pytest.mark.parametrize(
    ("weights", "activations", "want", "compute"),
    [
        ({"type": "float", "num_bits": 8, "strategy": "channel"}, {"num_bits": 8}, 8, "fp8"),
        ({"type": "float", "num_bits": 8}, None, 8, "bf16"),
        ({"type": "float", "num_bits": 8, "block_structure": [128, 128]}, {}, 8 + 32 / 128**2, "bf16"),
        ({"type": "int", "num_bits": 8, "strategy": "channel"}, {"num_bits": 8}, 8, "int8"),
        ({"type": "int", "num_bits": 4, "group_size": 128, "symmetric": True}, None, 4 + 16 / 128, "bf16"),
        ({"type": "int", "num_bits": 4, "group_size": 128, "symmetric": False}, None, 4 + 20 / 128, "bf16"),
        ({"type": "float", "num_bits": 4, "group_size": 16}, {"num_bits": 4}, 4.5, "fp4"),
        ({"type": "float", "num_bits": 4, "group_size": 32}, None, 4.25, "bf16"),
    ],
)
def test_compressed_tensors(
    weights: dict[str, Any], activations: dict[str, Any] | None, want: float, compute: str
) -> None:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    arch = built(
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    )
    matrix = arch.layers[0].matrices[0]
    assert (bits(matrix), matrix.compute) == (pytest.approx(want), compute)
    assert bits(arch.head) == 16


def test_groups_by_name_win_over_the_class() -> None:
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8}},
        "group_1": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 4, "group_size": 128}},
    }
    arch = built({"quant_method": "compressed-tensors", "config_groups": groups})
    layer = arch.layers[0]
    assert bits(named(layer, "o")) == 8
    assert bits(named(layer, "down")) == 4.125
    assert bits(arch.head) == 8, "Linear without lm_head in `ignore` is the head too"


def test_layers_left_out_stand_apart() -> None:
    arch = built(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["model.layers.2.self_attn*"]}
    )
    assert [layer.count for layer in arch.layers] == [3, 1]
    assert bits(named(arch.layers[1], "qkv")) == 16
    assert bits(named(arch.layers[1], "gate_up")) == 4.5


def test_a_part_that_is_left_out_counts_in_the_fused_matrix() -> None:
    arch = built({"quant_method": "fp8", "modules_to_not_convert": ["v_proj"]})
    # q is 512 outputs, k and v 256 each: a quarter of qkv keeps 16 bits.
    assert bits(named(arch.layers[0], "qkv")) == 10


def test_the_router_is_never_quantised() -> None:
    layer = built({"quant_method": "awq", "bits": 4, "group_size": 128}, MOE).layers[0]
    assert bits(named(layer, "router")) == 16
    assert layer.experts is not None
    assert bits(layer.experts.matrices[0]) == pytest.approx(4.15625)


def test_mxfp4_converts_experts_only() -> None:
    layer = built({"quant_method": "mxfp4"}, MOE).layers[0]
    assert bits(named(layer, "qkv")) == 16
    assert layer.experts is not None
    assert [bits(matrix) for matrix in layer.experts.matrices] == [4.25, 4.25]


def test_gptq_says_when_it_quantised_the_head() -> None:
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}
    assert bits(built(fields).head) == 4.15625
    tied = built(fields, {**BASE, "tie_word_embeddings": True})
    assert bits(tied.head) == 16, "a tied head is the embedding"


def test_kimi_k2_thinking_weighs_what_the_hub_says() -> None:
    """Its experts are int4 in groups of 32 without zero points, the rest bf16: 594 GB of files."""
    fields = dict(json.loads(_shipped("kimi-k2")))
    weights = {"type": "int", "num_bits": 4, "group_size": 32, "symmetric": True}
    fields["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
    }
    assert from_config(fields, "m").weight_bytes == pytest.approx(594e9, rel=0.001)
    nested = {"model_type": "kimi_k25", "text_config": fields}
    assert from_config(nested, "m").weight_bytes == from_config(fields, "m").weight_bytes


def _shipped(name: str) -> str:
    return (Path(__file__).parent.parent / "models_roofline/data/models" / f"{name}.json").read_text()


def test_a_quantisation_file_beside_the_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    exported = {"producer": {}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(exported))
    assert bits(load_config(tmp_path).layers[0].matrices[0]) == 4.5


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "aqlm"}, "quantization_config.quant_method 'aqlm' is not known here"),
        ({}, "quantization_config.quant_method is missing"),
        ({"quant_method": "gptq"}, "quantization_config.bits is missing"),
        ({"quant_method": "gptq", "bits": 4}, "quantization_config.group_size is missing"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo 'W4A8' is not known"),
        ({"quant_method": "modelopt"}, "quant_algo"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be a square tile"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "must be a list of module names"),
        ({"quant_method": "compressed-tensors"}, "config_groups must be an object"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["re:("]}, "not a valid regular expression"),
    ],
)
def test_what_is_not_understood_is_named(quantization: dict[str, Any], words: str) -> None:
    with pytest.raises(RooflineError) as caught:
        built(quantization)
    assert words in str(caught.value)


def test_with_weights_changes_layers_and_nothing_else() -> None:
    arch = load_model("qwen3-30b-a3b")
    small = with_weights(arch, int4(128))
    assert (small.total_params, small.embedding, small.head) == (arch.total_params, arch.embedding, arch.head)
    layer = small.layers[0]
    assert bits(named(layer, "router")) == 16
    assert layer.vector_bytes == arch.layers[0].vector_bytes
    assert layer.experts is not None
    assert {bits(m) for m in (named(layer, "qkv"), named(layer, "o"), *layer.experts.matrices)} == {4.15625}


def test_with_weights_can_undo_a_quantised_checkpoint() -> None:
    arch = load_model("gpt-oss-20b")
    assert with_weights(arch, FORMATS["bf16"]).weight_bytes == 2 * arch.total_params


@pytest.mark.parametrize("weights", ["fp16", "int4"])
def test_a_model_in_fp16_runs_where_bf16_is_lacking(weights: str) -> None:
    bf16 = load_model("llama-3.2-1b")
    half = with_weights(bf16, FORMATS["fp16"])
    assert half.weight_bytes == bf16.weight_bytes
    assert predict(with_weights(half, FORMATS[weights]), "T4").tpot_s > 0


def test_weight_only_formats_are_multiplied_in_the_type_of_the_rest() -> None:
    """AWQ and GPTQ checkpoints are mostly float16, and run on devices without bf16."""
    arch = built({"quant_method": "awq", "bits": 4, "group_size": 128}, BASE | {"torch_dtype": "float16"})
    assert {matrix.compute for matrix in (arch.head, *arch.layers[0].matrices)} == {"fp16"}

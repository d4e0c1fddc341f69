"""models_roofline.gguf_file: exact architectures out of GGUF headers, and damaged headers refused in words.

Headers are written here with the `gguf` package's own writer, at the shapes of published models and without tensor
data. Totals are those of the model cards and safetensors indexes of the models named.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models_roofline.architecture import Architecture
from models_roofline.errors import RooflineError
from models_roofline.families import from_config, load_model
from models_roofline.gguf_file import load_gguf
from models_roofline.gguf_header import gguf_format, read_header

Tensors = dict[str, tuple[tuple[int, ...], str]]
"""Name → shape in the order of a checkpoint (outputs first) and number type."""
Metadata = Mapping[str, object]


def write(path: Path, arch: str, metadata: Metadata, tensors: Tensors, split: int = 0) -> Path:
    """A GGUF header. Keys that begin with a dot are put behind the architecture's name."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    for key, value in metadata.items():
        _add(writer, f"{arch}{key}" if key.startswith(".") else key, value)
    for name, (shape, kind) in tensors.items():
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), stored(shape, kind), number)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, (list, tuple)):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_uint32(key, value)


def stored(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a tensor by the package's table, not by ours."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(np.prod(shape, dtype=object)) // block * size


def elements(tensors: Tensors) -> int:
    return sum(int(np.prod(shape, dtype=object)) for shape, _ in tensors.values())


def total_bytes(tensors: Tensors) -> int:
    return sum(stored(*tensor) for tensor in tensors.values())


def vectors(sizes: Mapping[str, int]) -> Tensors:
    return {name: ((size,), "F32") for name, size in sizes.items()}


def top(vocab: int, hidden: int, *, tied: bool, kind: str = "F16") -> Tensors:
    tables = {"token_embd.weight": ((vocab, hidden), kind)}
    if not tied:
        tables["output.weight"] = ((vocab, hidden), kind)
    return {**tables, **vectors({"output_norm.weight": hidden})}


def mlp(hidden: int, inner: int, kind: str, suffix: str = "", experts: int = 0) -> Tensors:
    stack = (experts,) if experts else ()
    return {
        f"ffn_gate{suffix}.weight": ((*stack, inner, hidden), kind),
        f"ffn_up{suffix}.weight": ((*stack, inner, hidden), kind),
        f"ffn_down{suffix}.weight": ((*stack, hidden, inner), kind),
    }


def attention(hidden: int, heads: int, kv: int, dim: int, kind: str = "F16") -> Tensors:
    return {
        "attn_q.weight": ((heads * dim, hidden), kind),
        "attn_k.weight": ((kv * dim, hidden), kind),
        "attn_v.weight": ((kv * dim, hidden), kind),
        "attn_output.weight": ((hidden, heads * dim), kind),
        **vectors({"attn_norm.weight": hidden, "ffn_norm.weight": hidden}),
    }


def blocks(*each: Tensors) -> Tensors:
    return {f"blk.{i}.{name}": tensor for i, block in enumerate(each) for name, tensor in block.items()}


def heads_metadata(
    layers: int, hidden: int, heads: int, kv: int, dim: int | None = None
) -> dict[str, object]:
    sizes = {".attention.key_length": dim, ".attention.value_length": dim} if dim else {}
    return {
        ".block_count": layers,
        ".embedding_length": hidden,
        ".context_length": 8192,
        ".attention.head_count": heads,
        ".attention.head_count_kv": kv,
        **sizes,
    }


def dense(
    layers: int, hidden: int, heads: int, kv: int, dim: int, inner: int, extra: Tensors | None = None
) -> Tensors:
    layer = {**attention(hidden, heads, kv, dim), **mlp(hidden, inner, "F16"), **(extra or {})}
    return blocks(*[layer] * layers)


def small(kind: str = "F16", **changes: object) -> tuple[dict[str, object], Tensors]:
    """A Llama of two blocks, for what does not depend on size."""
    metadata = {**heads_metadata(2, 256, 4, 2), **changes}
    layer = {**attention(256, 4, 2, 64, kind), **mlp(256, 512, kind)}
    return metadata, {**top(1024, 256, tied=True, kind=kind), **blocks(layer, layer)}


# Published models: the header alone gives the published count.


def llama_8b() -> tuple[str, Metadata, Tensors]:
    rotary = vectors({"rope_freqs.weight": 64})
    body = dense(32, 4096, 32, 8, 128, 14336)
    return "llama", heads_metadata(32, 4096, 32, 8), {**top(128256, 4096, tied=False), **rotary, **body}


def qwen2_05b() -> tuple[str, Metadata, Tensors]:
    bias = vectors({"attn_q.bias": 896, "attn_k.bias": 128, "attn_v.bias": 128})
    body = dense(24, 896, 14, 2, 64, 4864, bias)
    return "qwen2", heads_metadata(24, 896, 14, 2), {**top(151936, 896, tied=True), **body}


def qwen3_06b() -> tuple[str, Metadata, Tensors]:
    norms = vectors({"attn_q_norm.weight": 128, "attn_k_norm.weight": 128})
    body = dense(28, 1024, 16, 8, 128, 3072, norms)
    return "qwen3", heads_metadata(28, 1024, 16, 8, 128), {**top(151936, 1024, tied=True), **body}


def qwen3_30b() -> tuple[str, Metadata, Tensors]:
    norms = vectors({"attn_q_norm.weight": 128, "attn_k_norm.weight": 128})
    router = {"ffn_gate_inp.weight": ((128, 2048), "F32")}
    layer = {**attention(2048, 32, 4, 128), **norms, **router, **mlp(2048, 768, "F16", "_exps", 128)}
    metadata = {**heads_metadata(48, 2048, 32, 4, 128), ".expert_count": 128, ".expert_used_count": 8}
    return "qwen3moe", metadata, {**top(151936, 2048, tied=False), **blocks(*[layer] * 48)}


def mixtral() -> tuple[str, Metadata, Tensors]:
    router = {"ffn_gate_inp.weight": ((8, 4096), "F16")}
    layer = {**attention(4096, 32, 8, 128), **router, **mlp(4096, 14336, "F16", "_exps", 8)}
    metadata = {**heads_metadata(32, 4096, 32, 8), ".expert_count": 8, ".expert_used_count": 2}
    return "llama", metadata, {**top(32000, 4096, tied=False), **blocks(*[layer] * 32)}


def gemma3_1b() -> tuple[str, Metadata, Tensors]:
    norms = vectors(
        {"attn_q_norm.weight": 256, "attn_k_norm.weight": 256, "post_attention_norm.weight": 1152}
        | {"post_ffw_norm.weight": 1152}
    )
    metadata = {**heads_metadata(26, 1152, 4, 1, 256), ".attention.sliding_window": 512}
    return "gemma3", metadata, {**top(262144, 1152, tied=True), **dense(26, 1152, 4, 1, 256, 6912, norms)}


def gpt_oss_20b() -> tuple[str, Metadata, Tensors]:
    biases = vectors(
        {"attn_q.bias": 4096, "attn_k.bias": 512, "attn_v.bias": 512, "attn_output.bias": 2880}
        | {"attn_sinks.weight": 64, "ffn_gate_inp.bias": 32}
    )
    expert_biases: Tensors = {f"ffn_{part}_exps.bias": ((32, 2880), "F32") for part in ("gate", "up", "down")}
    layer = {
        **attention(2880, 64, 8, 64, "BF16"),
        **mlp(2880, 2880, "MXFP4", "_exps", 32),
        "ffn_gate_inp.weight": ((32, 2880), "F32"),
        **biases,
        **expert_biases,
    }
    metadata = {
        **heads_metadata(24, 2880, 64, 8, 64),
        ".attention.sliding_window": 128,
        ".expert_count": 32,
        ".expert_used_count": 4,
    }
    return "gpt-oss", metadata, {**top(201088, 2880, tied=False, kind="BF16"), **blocks(*[layer] * 24)}


def deepseek_v3() -> tuple[str, Metadata, Tensors]:
    latent: Tensors = {
        "attn_q_a.weight": ((1536, 7168), "F16"),
        "attn_q_b.weight": ((128 * 192, 1536), "F16"),
        "attn_kv_a_mqa.weight": ((576, 7168), "F16"),
        "attn_k_b.weight": ((128, 512, 128), "F16"),
        "attn_v_b.weight": ((128, 128, 512), "F16"),
        "attn_output.weight": ((7168, 128 * 128), "F16"),
        **vectors({"attn_norm.weight": 7168, "ffn_norm.weight": 7168}),
        **vectors({"attn_q_a_norm.weight": 1536, "attn_kv_a_norm.weight": 512}),
    }
    sparse = {
        **latent,
        **mlp(7168, 2048, "F16", "_exps", 256),
        **mlp(7168, 2048, "F16", "_shexp"),
        "ffn_gate_inp.weight": ((256, 7168), "F32"),
        **vectors({"exp_probs_b.bias": 256}),
    }
    metadata = {
        **heads_metadata(61, 7168, 128, 1, 576),
        ".attention.kv_lora_rank": 512,
        ".expert_count": 256,
        ".expert_used_count": 8,
    }
    body = blocks(*[{**latent, **mlp(7168, 18432, "F16")}] * 3, *[sparse] * 58)
    return "deepseek2", metadata, {**top(129280, 7168, tied=False), **body}


PUBLISHED = {
    "llama-3.1-8b": (llama_8b, 8_030_261_248),
    "qwen2.5-0.5b": (qwen2_05b, 494_032_768),
    "qwen3-0.6b": (qwen3_06b, 596_049_920),
    "qwen3-30b-a3b": (qwen3_30b, 30_532_122_624),
    "mixtral-8x7b": (mixtral, 46_702_792_704),
    "gemma-3-1b": (gemma3_1b, 999_885_952),
    "gpt-oss-20b": (gpt_oss_20b, 20_914_757_184),
    "deepseek-v3": (deepseek_v3, 671_026_419_200),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_header_gives_the_published_total(name: str, tmp_path: Path) -> None:
    make, total = PUBLISHED[name]
    arch, metadata, tensors = make()
    model = load_gguf(write(tmp_path / f"{name}.gguf", arch, metadata, tensors))
    assert (model.name, model.family, model.total_params) == (name, arch, total)
    rotary = {key: tensor for key, tensor in tensors.items() if "rope" in key}
    assert model.total_params == elements(tensors) - elements(rotary)
    assert model.weight_bytes == total_bytes(tensors) - total_bytes(rotary)


def signature(model: Architecture) -> list[tuple[object, ...]]:
    """All that does not depend on number types (of a state, the size does: llama.cpp keeps it in fp32)."""
    return sorted(
        (
            layer.count,
            sorted((one.name, one.n, one.k, one.split) for one in layer.matrices),
            layer.vectors,
            repr(layer.attention),
            layer.state and layer.state.flops_per_token,
            layer.experts
            and (
                layer.experts.number,
                layer.experts.top_k,
                layer.experts.vectors,
                sorted((one.name, one.n, one.k, one.split) for one in layer.experts.matrices),
            ),
        )
        for layer in model.layers
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_header_and_the_config_of_one_model_agree(name: str, tmp_path: Path) -> None:
    arch, metadata, tensors = PUBLISHED[name][0]()
    ours, theirs = load_gguf(write(tmp_path / "x.gguf", arch, metadata, tensors)), load_model(name)
    assert signature(ours) == signature(theirs)
    for figure in ("total_params", "active_params", "streamed_params", "routed_params", "tied", "n_layers"):
        assert getattr(ours, figure) == getattr(theirs, figure)
    for context in (1, 128, 8192, 131072):
        assert ours.kv_bytes(context) == theirs.kv_bytes(context)
    assert ours.kv_bytes_per_token_beyond_window() == theirs.kv_bytes_per_token_beyond_window()


def test_the_small_real_model(model: str) -> None:
    """98,362,432 bytes; 134,515,008 parameters in Q4_1 with the tied table in Q8_0; 30 blocks of 9/3 heads of 64."""
    arch = load_gguf(model)
    assert arch.total_params == arch.active_params == arch.streamed_params == 134_515_008
    table, matrices, norms = 49152 * 576, 134_515_008 - 49152 * 576 - 61 * 576, 61 * 576
    assert arch.weight_bytes == table // 32 * 34 + matrices // 32 * 20 + norms * 4
    assert arch.streamed_bytes == arch.weight_bytes
    assert (arch.tied, arch.hidden, arch.vocab, arch.n_layers, arch.max_context) == (
        True,
        576,
        49152,
        30,
        8192,
    )
    assert arch.kv_bytes_per_token() == 30 * 2 * 3 * 64 * 2
    assert signature(arch) == signature(load_model("smollm2-135m"))
    # What the file has beside its tensors: vocabulary and merges.
    assert 0 < Path(model).stat().st_size - arch.weight_bytes < 2_000_000


def test_the_small_real_model_is_read_as_the_package_reads_it(model: str) -> None:
    ours = read_header(Path(model))
    theirs = gguf.GGUFReader(model)
    assert {t.name: (t.params, t.bytes, t.format.name) for t in ours.tensors.values()} == {
        t.name: (t.n_elements, t.n_bytes, t.tensor_type.name) for t in theirs.tensors
    }
    kept = {key: theirs.fields[key].contents() for key in ours.metadata}
    assert kept == dict(ours.metadata)


def test_a_header_without_tensor_data_is_enough(model: str, tmp_path: Path) -> None:
    head = tmp_path / "head.gguf"
    head.write_bytes(Path(model).read_bytes()[: gguf.GGUFReader(model).data_offset])
    whole = load_gguf(model)
    assert (load_gguf(head).layers, load_gguf(head).weight_bytes) == (whole.layers, whole.weight_bytes)


# Number types.


@pytest.mark.parametrize("kind", [kind.name for kind in gguf.GGMLQuantizationType])
def test_bytes_of_every_number_type(kind: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    fmt = gguf_format(kind.lower())
    assert (fmt.name, fmt.block) == (kind, block)
    assert fmt.matrix_bytes(7, 3 * block) == 21 * size


def test_known_bits_per_weight() -> None:
    """llama.cpp's own list (tools/quantize/README.md) says 4.5, 5.0, 6.5625 and 8.5."""
    bits = [gguf_format(kind).bits_per_weight for kind in ("Q4_K", "Q4_1", "Q6_K", "Q8_0", "MXFP4")]
    assert bits == [4.5, 5.0, 6.5625, 8.5, 4.25]
    assert [gguf_format(kind).compute for kind in ("F32", "F16", "BF16", "Q4_K")] == [
        "fp32",
        "fp16",
        "bf16",
        "bf16",
    ]
    with pytest.raises(RooflineError, match=r"^'q9_k' is not a GGUF number type; known: F32, "):
        gguf_format("q9_k")


def test_blocks_of_mixed_types_stand_apart(tmp_path: Path) -> None:
    metadata, tensors = small("Q4_K")
    tensors["blk.1.attn_v.weight"] = ((128, 256), "Q6_K")
    first, second = load_gguf(write(tmp_path / "x.gguf", "llama", metadata, tensors)).layers
    extra = stored((128, 256), "Q6_K") - stored((128, 256), "Q4_K")
    assert (first.count, second.count, second.total_bytes - first.total_bytes) == (1, 1, extra)


def test_scales_beside_weights_are_bytes_and_no_parameters(tmp_path: Path) -> None:
    metadata, tensors = small("NVFP4")
    plain = load_gguf(write(tmp_path / "plain.gguf", "llama", metadata, tensors))
    tensors |= vectors({"blk.0.attn_q.scale": 1, "blk.0.attn_q.input_scale": 1, "output.scale": 1})
    scaled = load_gguf(write(tmp_path / "scaled.gguf", "llama", metadata, tensors))
    assert scaled.total_params == plain.total_params
    assert scaled.weight_bytes == plain.weight_bytes + 3 * 4


# Families whose blocks differ.


def test_gpt2_positions_are_read_a_row_at_a_time(tmp_path: Path) -> None:
    """GPT-2: 124,439,808 parameters, of which 1024 positions × 768 are not streamed."""
    layer: Tensors = {
        "attn_qkv.weight": ((2304, 768), "F16"),
        "attn_output.weight": ((768, 768), "F16"),
        "ffn_up.weight": ((3072, 768), "F16"),
        "ffn_down.weight": ((768, 3072), "F16"),
        **vectors(
            {f"{norm}.{kind}": 768 for norm in ("attn_norm", "ffn_norm") for kind in ("weight", "bias")}
        ),
        **vectors(
            {"attn_qkv.bias": 2304, "attn_output.bias": 768, "ffn_up.bias": 3072, "ffn_down.bias": 768}
        ),
    }
    tensors = {
        **top(50257, 768, tied=True),
        "position_embd.weight": ((1024, 768), "F16"),
        **vectors({"output_norm.bias": 768}),
        **blocks(*[layer] * 12),
    }
    metadata = heads_metadata(12, 768, 12, 12)
    model = load_gguf(write(tmp_path / "gpt2.gguf", "gpt2", metadata, tensors))
    assert model.total_params == 124_439_808
    assert model.streamed_params == 124_439_808 - 1024 * 768
    assert {one.name for one in model.layers[0].matrices} == {"qkv", "o", "up", "down"}


def test_phi3_stores_gate_and_up_as_one(tmp_path: Path) -> None:
    """Phi-3-mini: 3,821,079,552 parameters. Its window, where it has one, is in every block."""
    layer: Tensors = {
        "attn_qkv.weight": ((3 * 3072, 3072), "F16"),
        "attn_output.weight": ((3072, 3072), "F16"),
        "ffn_up.weight": ((2 * 8192, 3072), "F16"),
        "ffn_down.weight": ((3072, 8192), "F16"),
        **vectors({"attn_norm.weight": 3072, "ffn_norm.weight": 3072}),
    }
    factors = vectors({"rope_factors_long.weight": 48, "rope_factors_short.weight": 48})
    tensors = {**top(32064, 3072, tied=False), **factors, **blocks(*[layer] * 32)}
    metadata = {**heads_metadata(32, 3072, 32, 32), ".attention.sliding_window": 2047}
    model = load_gguf(write(tmp_path / "phi3.gguf", "phi3", metadata, tensors))
    assert model.total_params == 3_821_079_552
    assert {one.name for one in model.layers[0].matrices} == {"qkv", "o", "gate_up", "down"}
    assert [layer.attention.window for layer in model.layers if layer.attention] == [2047]
    assert model.notes == (
        "A window of 2047 tokens in all blocks is the family's; the file does not say where.",
    )


def test_mamba_keeps_a_state_in_place_of_a_cache(tmp_path: Path) -> None:
    """mamba-130m: 129,135,360 parameters; state-spaces' own config."""
    layer: Tensors = {
        "ssm_in.weight": ((3072, 768), "F16"),
        "ssm_x.weight": ((80, 1536), "F16"),
        "ssm_dt.weight": ((1536, 48), "F16"),
        "ssm_out.weight": ((768, 1536), "F16"),
        "ssm_conv1d.weight": ((1536, 4), "F32"),
        "ssm_a": ((1536, 16), "F32"),
        **vectors({"attn_norm.weight": 768, "ssm_conv1d.bias": 1536, "ssm_dt.bias": 1536, "ssm_d": 1536}),
    }
    metadata = {
        **heads_metadata(24, 768, 0, 0),
        ".ssm.conv_kernel": 4,
        ".ssm.inner_size": 1536,
        ".ssm.state_size": 16,
        ".ssm.time_step_rank": 48,
    }
    tensors = {**top(50280, 768, tied=True), **blocks(*[layer] * 24)}
    model = load_gguf(write(tmp_path / "mamba.gguf", "mamba", metadata, tensors))
    config = {"model_type": "mamba", "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24}
    assert model.total_params == 129_135_360
    assert signature(model) == signature(from_config(config, "mamba-130m"))
    assert model.kv_bytes_per_token() == 0
    assert model.state_bytes == 24 * 4 * (1536 * 16 + 1536 * 3)


def mamba2_block(hidden: int, inner: int, heads: int, groups: int, size: int) -> Tensors:
    channels = inner + 2 * groups * size
    return {
        "ssm_in.weight": ((inner + channels + heads, hidden), "F16"),
        "ssm_out.weight": ((hidden, inner), "F16"),
        "ssm_conv1d.weight": ((channels, 4), "F32"),
        "ssm_a": ((heads, 1), "F32"),
        "ssm_d": ((heads, 1), "F32"),
        "ssm_norm.weight": ((groups, inner // groups), "F32"),
        **vectors({"attn_norm.weight": hidden, "ssm_conv1d.bias": channels, "ssm_dt.bias": heads}),
    }


def test_mamba2_counts_groups(tmp_path: Path) -> None:
    """mamba2-130m: 128,989,632 parameters; 24 heads of 64, one group, 128 states."""
    body = blocks(*[mamba2_block(768, 1536, 24, 1, 128)] * 24)
    metadata = {
        **heads_metadata(24, 768, 0, 0),
        ".ssm.conv_kernel": 4,
        ".ssm.inner_size": 1536,
        ".ssm.state_size": 128,
        ".ssm.group_count": 1,
    }
    path = write(tmp_path / "x.gguf", "mamba2", metadata, {**top(50288, 768, tied=True), **body})
    assert load_gguf(path).total_params == 128_989_632
    metadata[".ssm.group_count"] = 8
    with pytest.raises(
        RooflineError, match=r"blk\.0\.ssm_conv1d\.weight has shape \[4, 1792\], and 14336 in place"
    ):
        load_gguf(write(tmp_path / "y.gguf", "mamba2", metadata, {**top(50288, 768, tied=True), **body}))


def test_nemotron_h_has_one_part_a_block(tmp_path: Path) -> None:
    """Mamba 2, an MLP without a gate, attention, and experts in a narrower space; head counts are a list."""
    mlp_part: Tensors = {"ffn_up.weight": ((512, 256), "F16"), "ffn_down.weight": ((256, 512), "F16")}
    experts: Tensors = {
        "ffn_gate_inp.weight": ((8, 256), "F32"),
        "ffn_latent_down.weight": ((64, 256), "F16"),
        "ffn_latent_up.weight": ((256, 64), "F16"),
        "ffn_up_shexp.weight": ((128, 256), "F16"),
        "ffn_down_shexp.weight": ((256, 128), "F16"),
        "ffn_up_exps.weight": ((8, 96, 64), "Q8_0"),
        "ffn_down_exps.weight": ((8, 64, 96), "Q8_0"),
        **vectors({"exp_probs_b.bias": 8}),
    }
    norm = vectors({"attn_norm.weight": 256})
    grouped = attention(256, 8, 2, 32)
    del grouped["ffn_norm.weight"]
    parts = [mamba2_block(256, 512, 8, 2, 32), {**norm, **mlp_part}, grouped, {**norm, **experts}]
    metadata = {
        **heads_metadata(4, 256, 8, 2, 32),
        ".attention.head_count_kv": [0, 0, 2, 0],
        ".ssm.conv_kernel": 4,
        ".ssm.inner_size": 512,
        ".ssm.state_size": 32,
        ".ssm.group_count": 2,
        ".expert_count": 8,
        ".expert_used_count": 2,
    }
    tensors = {**top(1024, 256, tied=False), **blocks(*parts)}
    model = load_gguf(write(tmp_path / "n.gguf", "nemotron_h_moe", metadata, tensors))
    config = {
        "model_type": "nemotron_h",
        "vocab_size": 1024,
        "hidden_size": 256,
        "hybrid_override_pattern": "M-*E",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 32,
        "intermediate_size": 512,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 128,
        "moe_latent_size": 64,
    }
    theirs = from_config(config, "n")
    assert signature(model) == signature(theirs)
    assert (model.total_params, model.active_params) == (theirs.total_params, theirs.active_params)
    assert model.kv_bytes_per_token() == 2 * 2 * 32 * 2


def test_qwen3_next_has_linear_layers(tmp_path: Path) -> None:
    """Qwen3-Coder-Next: 79,674,391,296 parameters, 3,874,929,408 active."""
    experts: Tensors = {
        **mlp(2048, 512, "Q4_K", "_exps", 512),
        **mlp(2048, 512, "Q8_0", "_shexp"),
        "ffn_gate_inp.weight": ((512, 2048), "F32"),
        **vectors({"ffn_gate_inp_shexp.weight": 2048, "post_attention_norm.weight": 2048}),
    }
    linear: Tensors = {
        "attn_qkv.weight": ((8192, 2048), "Q8_0"),
        "attn_gate.weight": ((4096, 2048), "Q8_0"),
        "ssm_ba.weight": ((64, 2048), "Q8_0"),
        "ssm_out.weight": ((2048, 4096), "Q8_0"),
        "ssm_conv1d.weight": ((8192, 4), "F32"),
        **vectors({"attn_norm.weight": 2048, "ssm_a": 32, "ssm_dt.bias": 32, "ssm_norm.weight": 128}),
    }
    full: Tensors = {
        "attn_q.weight": ((2 * 16 * 256, 2048), "Q8_0"),
        "attn_k.weight": ((512, 2048), "Q8_0"),
        "attn_v.weight": ((512, 2048), "Q8_0"),
        "attn_output.weight": ((2048, 4096), "Q8_0"),
        **vectors({"attn_norm.weight": 2048, "attn_q_norm.weight": 256, "attn_k_norm.weight": 256}),
    }
    metadata = {
        **heads_metadata(48, 2048, 16, 2, 256),
        ".ssm.conv_kernel": 4,
        ".ssm.inner_size": 4096,
        ".ssm.state_size": 128,
        ".ssm.group_count": 16,
        ".ssm.time_step_rank": 32,
        ".expert_count": 512,
        ".expert_used_count": 10,
    }
    body = blocks(
        *[{**linear, **experts}, {**linear, **experts}, {**linear, **experts}, {**full, **experts}] * 12
    )
    tensors = {**top(151936, 2048, tied=False, kind="Q8_0"), **body}
    model = load_gguf(write(tmp_path / "q.gguf", "qwen3next", metadata, tensors))
    assert (model.total_params, model.active_params) == (79_674_391_296, 3_874_929_408)
    config = {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
    }
    assert signature(model) == signature(from_config(config, "q"))
    assert model.kv_bytes_per_token() == 12 * 2 * 2 * 256 * 2
    assert model.state_bytes == 36 * 4 * (32 * 128 * 128 + 3 * 8192)


def seen(tmp_path: Path, arch: str, layers: int, **metadata: object) -> list[int | None]:
    """Windows of a small model, block by block; a bias of its own keeps each block apart."""
    base = {**heads_metadata(layers, 256, 4, 2), **{f".attention.{k}": v for k, v in metadata.items()}}
    layer = {**attention(256, 4, 2, 64), **mlp(256, 512, "F16")}
    marked = [{**layer, **vectors({"attn_q.bias": i + 1})} for i in range(layers)]
    tensors = {**top(64, 256, tied=True), **blocks(*marked)}
    model = load_gguf(write(tmp_path / "w.gguf", arch, base, tensors))
    return [layer.attention.window for layer in model.layers if layer.attention]


def test_windows_follow_the_file_and_else_the_family(tmp_path: Path) -> None:
    assert seen(tmp_path, "gemma2", 4) == [4096, None, 4096, None]
    assert seen(tmp_path, "gemma3", 7, sliding_window=512) == [512] * 5 + [None, 512]
    assert seen(tmp_path, "gemma3", 2) == [None, None]
    assert seen(tmp_path, "gpt-oss", 3, sliding_window=128) == [128, None, 128]
    assert seen(tmp_path, "llama4", 5) == [8192] * 3 + [None, 8192]
    assert seen(tmp_path, "llama4", 2, sliding_window=0) == [None, None]
    assert seen(tmp_path, "gemma2", 3, sliding_window_pattern=3) == [4096, 4096, None]
    assert seen(tmp_path, "qwen3", 3, sliding_window=64, sliding_window_pattern=[True, False]) == [
        64,
        None,
        64,
    ]
    with pytest.raises(
        RooflineError, match=r"qwen3\.attention\.sliding_window is 64, and no .*_pattern says"
    ):
        seen(tmp_path, "qwen3", 3, sliding_window=64)


def test_only_llama4_windows_are_chunks(tmp_path: Path) -> None:
    metadata, tensors = small()
    for arch, chunked in (("llama4", True), ("gemma2", False)):
        first = load_gguf(write(tmp_path / f"{arch}.gguf", arch, metadata, tensors)).layers[0].attention
        assert first is not None
        assert first.chunked is chunked


def test_prediction_blocks_stand_behind_the_model(tmp_path: Path) -> None:
    metadata, tensors = small()
    plain = load_gguf(write(tmp_path / "plain.gguf", "glm4moe", metadata, tensors))
    layer = {**attention(256, 4, 2, 64), **mlp(256, 512, "F16")}
    extra: Tensors = {
        "nextn.eh_proj.weight": ((256, 512), "F16"),
        "nextn.embed_tokens.weight": ((1024, 256), "F16"),
        **vectors({"nextn.enorm.weight": 256}),
    }
    more = {f"blk.2.{name}": tensor for name, tensor in {**layer, **extra}.items()}
    metadata |= {".block_count": 3, ".nextn_predict_layers": 1}
    model = load_gguf(write(tmp_path / "mtp.gguf", "glm4moe", metadata, {**tensors, **more}))
    assert model.layers == plain.layers
    assert (model.total_params, model.mtp_params) == (plain.total_params, elements(more))
    assert "eh_proj" in {one.name for one in model.mtp[0].matrices}


# Split files.


def test_any_part_of_a_split_model_leads_to_all(tmp_path: Path) -> None:
    metadata, tensors = small()
    whole = load_gguf(write(tmp_path / "whole.gguf", "llama", metadata, tensors))
    write(tmp_path / "split.gguf", "llama", metadata, tensors, split=8)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert [part.name for part in parts] == [f"split-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        assert (load_gguf(part).layers, load_gguf(part).weight_bytes) == (whole.layers, whole.weight_bytes)
    parts[1].unlink()
    with pytest.raises(
        RooflineError, match=r"its part split-00002-of-00003\.gguf is not beside it; download all 3"
    ):
        load_gguf(parts[0])
    renamed = parts[0].rename(tmp_path / "other.gguf")
    with pytest.raises(RooflineError, match=r"^other\.gguf: is one of 3 parts, and its name does not end in"):
        load_gguf(renamed)


def test_parts_of_different_models_are_refused(tmp_path: Path) -> None:
    metadata, tensors = small()
    write(tmp_path / "split.gguf", "llama", metadata, tensors, split=8)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(RooflineError, match=r"hold 16 tensors together and should hold \d+"):
        load_gguf(parts[0])


# Wrong files.

START = b"GGUF" + struct.pack("<I", 3)
KEY = struct.pack("<Q", 1) + b"k"

DAMAGED = {
    "empty": (b"", "does not begin with GGUF"),
    "other": (b"PK\3\4" + bytes(64), "does not begin with GGUF"),
    "magic": (b"GGUF", "ends inside its header, at byte 4; the download is not complete"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + bytes(64), "is GGUF version 1; versions 2 and 3 are read"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(64), "is big-endian GGUF"),
    "tensors": (
        START + struct.pack("<QQ", 2**60, 0),
        "damaged .it announces 1,152,921,504,606,846,976 tensors",
    ),
    "entries": (
        START + struct.pack("<QQ", 0, 2**63),
        "damaged .it announces 9,223,372,036,854,775,808 metadata",
    ),
    "key": (START + struct.pack("<QQQ", 0, 1, 2**27), "ends inside its header"),
    "long key": (START + struct.pack("<QQQ", 0, 1, 2**60), "announces .* bytes of a string"),
    "value type": (START + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IQ", 77, 0), "k has value type 77"),
    "nested": (
        START + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", 9, 9, 1) + bytes(64),
        "k has value type 9",
    ),
    "items": (START + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", 9, 8, 2**50), "items in k"),
    "list": (
        START + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", 9, 6, 2**20),
        "ends inside its header",
    ),
    "strings": (
        START + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQQ", 9, 8, 3, 2**62) + bytes(64),
        "ends inside its header",
    ),
    "nothing": (START + struct.pack("<QQ", 0, 0), "general.architecture is missing"),
    "dimensions": (
        START + struct.pack("<QQ", 1, 0) + KEY + struct.pack("<I", 9),
        "announces 9 dimensions of k",
    ),
    "shape": (
        START + struct.pack("<QQ", 1, 0) + KEY + struct.pack("<IQIQ", 1, 33, 8, 0),
        r"k cannot have shape \[33\] in Q8_0",
    ),
    "size": (
        START + struct.pack("<QQ", 1, 0) + KEY + struct.pack("<IQQIQ", 2, 32, 0, 8, 0),
        r"k cannot have shape \[32, 0\] in Q8_0",
    ),
    "number type": (
        START + struct.pack("<QQ", 1, 0) + KEY + struct.pack("<IQIQ", 1, 32, 4, 0),
        "k has number type 4, which this version of the gguf package does not know",
    ),
    "twice": (
        START + struct.pack("<QQ", 2, 0) + (KEY + struct.pack("<IQIQ", 1, 32, 0, 0)) * 2,
        "two tensors have one name",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_refused_in_words(case: str, tmp_path: Path) -> None:
    data, sentence = DAMAGED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(RooflineError, match=rf"^bad\.gguf: .*{sentence}"):
        load_gguf(path)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(RooflineError, match="cannot be read"):
            load_gguf(path)


def test_a_header_cut_anywhere_is_refused_in_words(tmp_path: Path) -> None:
    metadata, tensors = small(**{"tokenizer.ggml.tokens": ["a", "bb", "ccc"], "tokenizer.ggml.scores": [0.5]})
    data = write(tmp_path / "whole.gguf", "llama", metadata, tensors).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        with pytest.raises(
            RooflineError, match=r"^cut\.gguf: (ends inside its header|does not begin with GGUF)"
        ):
            load_gguf(cut)


@settings(deadline=None)
@given(st.data())
def test_a_flipped_byte_gives_an_architecture_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    metadata, tensors = small()
    content = bytearray(write(folder / "x.gguf", "llama", metadata, tensors).read_bytes())
    content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / "x.gguf").write_bytes(content)
    assert sentence_or_params(folder / "x.gguf")


def sentence_or_params(path: Path) -> bool:
    """Whether a file gives parameters, or a sentence that names it (the command escapes what it quotes of the file)."""
    try:
        return load_gguf(path).total_params > 0
    except RooflineError as error:
        return str(error).startswith(f"{path.name}: ")


def wrong() -> Iterator[tuple[str, dict[str, object], Tensors, str]]:
    """Headers that are whole and describe no model: what is changed, and the sentence."""
    no_table = Tensors({"token_embd.weight": ((8, 8), "F32")})
    yield "llama", {".block_count": 3}, {}, r"has no tensor of blk\.2, and llama\.block_count is 3"
    yield "llama", {".block_count": 1}, {}, r"has tensors of blk\.1, and llama\.block_count is 1"
    yield "llama", {".block_count": 2**32 - 1}, {}, r"has no tensor of blk\.2"
    yield "llama", {".block_count": 0}, {}, r"llama\.block_count is 0"
    yield "llama", {".nextn_predict_layers": 2}, {}, r"nextn_predict_layers leaves no block of 2"
    yield (
        "llama",
        {".attention.head_count": "four"},
        {},
        r"head_count must be a whole number of at least 0, not 'four'",
    )
    yield (
        "llama",
        {".attention.head_count": 2**31},
        {},
        r"embedding_length 256 does not divide by 2147483648 heads",
    )
    yield (
        "llama",
        {".attention.head_count_kv": 4},
        {},
        r"attn_[kv]\.weight has shape \[256, 128\], and 256 in place",
    )
    yield "llama", {".attention.key_length": 32}, {}, r"attn_k\.weight has shape"
    yield (
        "llama",
        {".embedding_length": 128},
        {},
        r"token_embd\.weight has shape \[256, 1024\], and 128 in place of 256",
    )
    yield "llama", {}, no_table, r"token_embd\.weight has shape"
    yield (
        "llama",
        {},
        {"blk.0.attn_bonus.weight": ((8, 8), "F32")},
        r"the tensor blk\.0\.attn_bonus\.weight is not known",
    )
    yield (
        "llama",
        {},
        {"bonus.weight": ((8, 8), "F32")},
        r"the tensor bonus\.weight is not known in a llama model",
    )
    yield "llamax", {}, {}, r"general\.architecture 'llamax' is not a family .*; did you mean llama"
    yield "clip", {}, {}, r"holds the vision part of a model; name the file of its text model"


@pytest.mark.parametrize("case", list(wrong()), ids=lambda case: f"{case[0]}-{case[3][:40]}")
def test_a_header_that_contradicts_itself(
    case: tuple[str, dict[str, object], Tensors, str], tmp_path: Path
) -> None:
    arch, change, more, sentence = case
    metadata, tensors = small(**change)
    with pytest.raises(RooflineError, match=rf"^x\.gguf: .*{sentence}"):
        load_gguf(write(tmp_path / "x.gguf", arch, metadata, {**tensors, **more}))


@pytest.mark.parametrize("key", [".block_count", ".embedding_length", ".attention.head_count"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    metadata, tensors = small()
    del metadata[key]
    with pytest.raises(RooflineError, match=rf"llama\{key} is missing; convert the model again"):
        load_gguf(write(tmp_path / "x.gguf", "llama", metadata, tensors))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({".expert_count": 16}, r"ffn_\w+_exps\.weight has shape .*, and 16 in place of 128 follows from"),
        ({".expert_used_count": 129}, r"expert_used_count is 129, but there are 128 experts"),
    ],
)
def test_experts_must_agree(change: dict[str, object], sentence: str, tmp_path: Path) -> None:
    arch, metadata, tensors = qwen3_30b()
    with pytest.raises(RooflineError, match=sentence):
        load_gguf(write(tmp_path / "x.gguf", arch, {**metadata, **change}, tensors))

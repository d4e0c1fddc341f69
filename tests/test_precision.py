"""runners.precision: one phrase whatever an engine's words for types are, and the type of most weights of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from runners import precision


@pytest.mark.parametrize(
    ("compute", "weights", "want"),
    [
        ("f32", None, "float32"),
        ("torch.float32", "f32", "float32"),
        ("float32", "all F32", "float32"),
        ("bf16", "u4", "bfloat16, 4-bit weights"),
        ("float32", "Q4_1", "float32, 4-bit weights"),
        ("float32", "Q4_K - Medium", "float32, 4-bit weights"),
        ("float32", "IQ2_XXS - 2.0625 bpw", "float32, 2-bit weights"),
        ("float32", "Q8_0 (guessed)", "float32, 8-bit weights"),
        ("float32", "TQ1_0 - 1.69 bpw ternary", "float32, 1-bit weights"),
        ("float32", "F16", "float32, float16 weights"),
        ("half", "i8", "float16, 8-bit weights"),
        ("bfloat16", "None", "bfloat16"),
        ("bfloat16", "fp8", "bfloat16, fp8 weights"),
        ("auto", "Q4_1", None),
        (None, "Q4_1", None),
    ],
)
def test_phrases(compute: str | None, weights: str | None, want: str | None) -> None:
    assert precision.phrase(compute, weights) == want


def test_engines_with_the_same_arithmetic_say_the_same() -> None:
    """OpenVINO told `f32`, and llama.cpp, over one Q4_1 file; transformers, which takes its weights apart, does not."""
    assert precision.phrase("f32", "u4") == precision.phrase("float32", "Q4_1") != precision.phrase("float32")


def test_the_type_of_most_weights_of_a_gguf_file(model: str, tmp_path: Path) -> None:
    assert precision.of_gguf(Path(model)) == "Q4_1"  # its embedding is Q8_0, its norms F32
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert precision.of_gguf(tmp_path / "x.gguf") is None


IR = """<net><layers>
<layer type="Parameter"><data element_type="i64" shape="?,?"/></layer>
<layer type="Const"><data element_type="u4" shape="192,18,32" offset="0" size="55296"/></layer>
<layer type="Const"><data element_type="f16" shape="192,18,1" offset="1" size="6912"/></layer>
<layer type="Const"><data element_type="u8" shape="100,1000" offset="2" size="100000"/></layer>
</layers></net>"""


def test_the_type_of_most_weights_of_openvinos_own_format(tmp_path: Path) -> None:
    """By values, not bytes: 110,592 of four bits are more than 100,000 of eight."""
    path = tmp_path / "openvino_model.xml"
    path.write_text(IR)
    assert precision.of_ir(path) == "u4"
    path.write_text("<net/>")
    assert precision.of_ir(path) is None
    path.write_text("<net")
    assert precision.of_ir(path) is None

"""`predict`, `crossover` and `models show` as commands: the documents that other tools read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from models_roofline import find_device
from specbench.device import Gpu, Gpus
from tests.conftest import Call

LLAMA = ("--model", "llama-3.1-8b")
H100 = ("--device", "H100-SXM5-80GB")


def document(call: Call, *args: object) -> Any:
    code, out, err = call(*args, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_predict_gives_every_cell_with_what_other_tools_rely_on(call: Call) -> None:
    found = document(
        call, "predict", *LLAMA, *H100, "--method", "eagle3", "--k", "2,4", "--batch", "1,8", "--context", "1024,8Ki",
        "--acceptance", "0.8",
    )  # fmt: skip
    cells = found["cells"]
    assert [(c["batch"], c["context"], c["k"]) for c in cells] == [
        (batch, context, k) for batch in (1, 8) for context in (1024, 8192) for k in (2, 4)
    ]
    assert {"tpot_s", "tokens_per_s", "al", "speedup", "bound", "terms"} <= set(cells[0])
    assert cells[1]["al"] == pytest.approx((1 - 0.8**5) / 0.2)
    assert all(1 < cell["speedup"] < cell["bound"] == cell["al"] for cell in cells)


def test_predict_of_plain_decoding_needs_no_acceptance(call: Call) -> None:
    cell = document(call, "predict", *LLAMA, *H100)["cells"][0]
    assert (cell["k"], cell["al"], cell["speedup"], cell["bound"]) == (0, 1, 1, 1)
    assert (
        cell["tokens_per_s"] < 223.19
    )  # all weights once at the full 3.35 TB/s, the bound of its expected values


def test_predict_for_people_says_what_the_row_was_held_against(call: Call) -> None:
    code, out, _ = call("predict", *LLAMA, *H100, "--method", "medusa", "--k", "3", "--acceptance", "0.6")
    assert code == 0
    assert "TPOT ms" in out
    assert "formula only" in out
    assert "Kernels only, so an upper estimate" in out


def test_a_lossy_method_is_marked(call: Call) -> None:
    _, out, _ = call(
        "predict", *LLAMA, *H100, "--method", "medusa-typical", "--k", "3", "--acceptance", "0.6"
    )
    assert "This method changes the text" in out


def test_the_engines_overhead_makes_rounds_longer(call: Call) -> None:
    asked = ("predict", *LLAMA, *H100, "--method", "eagle3", "--k", "3", "--acceptance", "0.8")
    without, with_ = (document(call, *asked, *more)["cells"][0] for more in ((), ("--overhead-ms", "1.2")))
    assert with_["t_round_s"] == pytest.approx(without["t_round_s"] + 1.2e-3)
    assert with_["terms"]["overhead_s"] == pytest.approx(1.2e-3)


def test_a_profile_that_holds_a_part_takes_the_rest_from_the_device(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"schema": 1, "bandwidth_bytes_per_s": 1e11}))
    slow, known = (
        document(call, "predict", *LLAMA, *H100, *more)["cells"][0] for more in (("--profile", path), ())
    )
    assert slow["tpot_s"] > 16.06e9 / 1e11 > known["tpot_s"]  # all weights at 100 GB/s


def test_a_csv_holds_every_cell(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    found = document(
        call, "predict", *LLAMA, *H100, "--batch", "1..4", "--context", "512,1024", "--csv", path
    )
    table = pd.read_csv(path)
    assert len(table) == len(found["cells"]) == 8
    assert table.tpot_s.tolist() == pytest.approx([cell["tpot_s"] for cell in found["cells"]])


def test_crossover_of_llama_at_the_published_keeps(call: Call) -> None:
    for keeps, ki in ((("0.7", "0.3"), 44.6), (("0.5", "0.3"), 74.3), (("0.5", "0.5"), 104.0)):
        found = document(call, "crossover", *LLAMA, "--keep-projection", keeps[0], "--keep-kv", keeps[1])
        assert round(found["crossover_tokens"] / 1024, 1) == ki
        assert found["beyond_window"] is False
    assert (
        round(document(call, "crossover", *LLAMA, "--keep-kv", "0.3", "--context", "131072")["bound_kv"], 2)
        == 1.60
    )


@pytest.mark.parametrize(
    ("keeps", "ki"), [(("0.7", "0.3"), 3.9), (("0.5", "0.3"), 6.4), (("0.5", "0.5"), 9.0)]
)
def test_crossover_of_the_small_model(call: Call, keeps: tuple[str, str], ki: float) -> None:
    found = document(
        call, "crossover", "--model", "smollm2-135m", "--keep-projection", keeps[0], "--keep-kv", keeps[1]
    )
    assert round(found["crossover_tokens"] / 1024, 1) == ki


def test_models_show_counts_what_other_tools_rely_on(call: Call) -> None:
    found = document(call, "models", "show", "gpt-oss-20b", "--context", "131072")
    assert found["total_params"] == 20_914_757_184
    assert found["active_params"] == 4_187_440_704
    assert found["streamed_params"] == 3_608_307_264
    assert found["streamed_bytes"] == 3_708_083_328
    assert found["weight_bytes"] == 13_761_264_768
    assert found["kv_bytes_per_token"] == 49_152
    assert found["kv_bytes_per_token_beyond_window"] == 24_576
    assert found["kv_bytes_at_context"] == {"131072": 3_224_371_200}
    assert found["tied"] is False


def test_models_show_for_people(call: Call) -> None:
    code, out, _ = call("models", "show", "deepseek-v3")
    assert code == 0
    assert "671,026,419,200" in out
    assert "latent attention, 128 heads over 576 values" in out
    assert "8 of 256 experts × 2048 + shared 2048" in out
    assert "13,463,426,304 parameters of multi-token-prediction layers" in out


def test_models_show_reads_a_config_a_directory_and_a_gguf_file(
    call: Call, model: str, tmp_path: Path
) -> None:
    config = {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
        "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for where in (tmp_path, tmp_path / "config.json", model):
        found = document(call, "models", "show", where)
        assert found["total_params"] == 134_515_008
        assert found["kv_bytes_per_token"] == 23_040
    assert found["weight_bytes"] < 98_362_432  # the last was the Q4_1 file


def test_without_a_device_it_is_this_machines_own_where_that_is_known(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbench.device.read_gpus", lambda: Gpus(reason="no driver"))
    monkeypatch.setattr("specbench.host._cpu_name", lambda: "Mystery 9000")
    code, out, err = call("predict", *LLAMA)
    assert (code, out) == (2, "")
    assert (
        "--device: this machine's own device is not known (Mystery 9000 is not a CPU of the catalogue" in err
    )
    gpu = Gpu(0, "NVIDIA L40S", device=find_device("L40S"))
    monkeypatch.setattr("specbench.device.read_gpus", lambda: Gpus((gpu,)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert document(call, "predict", *LLAMA)["device"] == "L40S"


def test_the_catalogues_can_be_listed(call: Call) -> None:
    devices = {row["id"]: row for row in document(call, "machine", "--catalogue")}
    assert devices["H100-SXM5-80GB"]["figures"]["mem_bw"]["value"] == 3.35e12
    models = {row["name"]: row for row in document(call, "models", "configs")}
    assert models["mixtral-8x7b"]["total_params"] == 46_702_792_704
    assert call("machine", "--catalogue")[1].startswith("device")
    assert call("models", "configs")[1].startswith("name")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("predict", *LLAMA, "--device", "H100"), "H100-SXM5-80GB"),
        (("predict", *LLAMA, "--device", "B9000"), "--device"),
        (("predict", "--model", "lama-3.1-8b", *H100), "did you mean llama-3.1-8b"),
        (("predict", *LLAMA, *H100, "--k", "-1", "--method", "eagle3", "--acceptance", "0.5"), "-1"),
        (("predict", *LLAMA, *H100, "--k", "2.5"), "--k: 2.5 is not a whole number."),
        (("predict", *LLAMA, *H100, "--k", "x"), "--k: 'x' is not a number"),
        (("predict", *LLAMA, *H100, "--batch", "inf"), "--batch: 'inf' is not a number"),
        (("predict", *LLAMA, *H100, "--batch", "nan"), "--batch: 'nan' is not a number"),
        (("predict", *LLAMA, *H100, "--k", "3", "--method", "eagle3"), "--acceptance: needed"),
        (("predict", *LLAMA, *H100, "--method", "eagle3"), "--k: eagle3 drafts tokens; say how many"),
        (("predict", *H100), "--model: name the model"),
        (("predict", *LLAMA, *H100, "--k", "3", "--method", "eagle3", "--acceptance", "2.8"), "al=2.8"),
        (("predict", *LLAMA, *H100, "--k", "3", "--method", "eagle3", "--acceptance", "al=9"), "--acceptance"),
        (("predict", *LLAMA, *H100, "--k", "3", "--method", "eagle3", "--acceptance", "0.4,0.6"), "--acceptance"),
        (("predict", *LLAMA, *H100, "--k", "5", "--method", "eagle3", "--acceptance", "0.6,0.4"), "--acceptance"),
        (("predict", *LLAMA, *H100, "--k", "3", "--method", "eagle3", "--acceptance", "0.6", "--coverage", "2"), "--coverage"),
        (("predict", *LLAMA, *H100, "--context", "200000"), "beyond the 131072"),
        (("predict", "--model", "llama-3.1-70b", *H100), "GiB too little"),
        (("predict", *LLAMA, "--device", "A100-SXM4-80GB", "--weights", "fp8"), "fp8"),
        (("predict", *LLAMA, *H100, "--weights", "int3"), "--weights: 'int3' is not a number format"),
        (("predict", *LLAMA, *H100, "--kv", "fp7"), "--kv: 'fp7' is not a cache format"),
        (("predict", *LLAMA, *H100, "--tp", "3"), "--tp"),
        (("predict", *LLAMA, *H100, "--launch", "lazy"), "--launch: 'lazy' is not one of graph, eager."),
        (("predict", *LLAMA, *H100, "--profile", "none.json"), "--profile"),
        (("predict", *LLAMA, *H100, "--csv", "/nowhere/at/all.csv"), "--csv"),
        (("predict", *LLAMA, *H100, "--batch", "5..1"), "--batch: 5..1 runs backwards; write 1..5."),
        (("predict", *LLAMA, *H100, "--batch", "1..1000000000"), "--batch: 1,000,000,000 cells are more than"),
        (("predict", *LLAMA, *H100, "--batch", "1..1000", "--context", "1..1000"), "--context, --k"),
        (("predict", *LLAMA, *H100, "--batch", "1e308"), "--batch: 1e+308 is beyond 1e+12"),
        (("predict", *LLAMA, *H100, "--tp", "0"), "--tp: 0 is not a number of devices"),
        (("predict", *LLAMA, *H100, "--draft-tp", "-1"), "--draft-tp: -1 is not a number of devices"),
        (("predict", *LLAMA, *H100, "--graph-sizes", "0"), "--graph-sizes: 0 is not a number of rows"),
        (("predict", *LLAMA, *H100, "--graph-sizes", ""), "--graph-sizes: '' is not a number"),
        (("predict", *LLAMA, *H100, "--weights", ""), "--weights: '' is not a number format"),
        (("predict", *LLAMA, *H100, "--kv-budget", "9" * 400), "--kv-budget"),
        (("predict", *LLAMA, *H100, "--k", "2", "--method", "eagle3", "--acceptance", "0.5", "--keep-layers", "0.5"), "--keep-layers: method eagle3 does not use it"),
        (("predict", *LLAMA, *H100, "--k", "2", "--method", "eagle3", "--acceptance", "0.5", "--hit-rate", "0.5"), "--hit-rate: method eagle3 does not use it"),
        (("predict", *LLAMA, *H100, "--k", "2", "--method", "ngram", "--acceptance", "0.5", "--draft", "llama-3.2-1b"), "--draft: method ngram drafts without a model"),
        (("predict", *LLAMA, *H100, "--k", "2", "--method", "eagle3", "--acceptance", "0.5", "--draft", "llama-3.2-1b", "--draft-vocab", "9"), "--draft-vocab: --draft names"),
        (("predict", *LLAMA, *H100, "--k", "-1", "--method", "eagle3", "--acceptance", "0.5"), "--k: -1 is not a number of drafted tokens"),
        (("crossover", *LLAMA, "--keep-kv", "0.5", "--context", ""), "--context: '' is not a number"),
        (("crossover", *LLAMA, "--keep-kv", "0.5,0.6", "--batch", "1..150000"), "--batch: 300,000 cells"),
        (("models", "show", "llama-3.1-8b", "--context", "-1"), "--context: -1 is not a number of tokens"),
        (("models", "show", "/dev/zero"), "/dev/zero is larger than 16 MiB"),
        (("machine", "--devices", "mine.csv"), "--devices: is listed with --catalogue"),
        (("crossover", *LLAMA), "--keep"),
        (("crossover", *LLAMA, "--keep-projection", "0"), "--keep-projection"),
        (("models", "show", "hf:notaname"), "hf:ORG/NAME"),
        (("models", "show", "/nowhere/config.json"), "/nowhere/config.json"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_sentence_and_exit_2(call: Call, args: tuple[str, ...], sentence: str) -> None:
    code, out, err = call(*args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert sentence in err


def test_an_error_stays_one_line_whatever_a_file_holds(call: Call, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "a\n\x1b[31m" + "b" * 10_000}))
    code, out, err = call("models", "show", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "model_type 'a\\n\\x1b[31m" in err
    assert len(err) < 2000


def test_a_config_is_named_in_one_sentence_whatever_is_wrong_with_it(call: Call, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.mkdir()
    (loop / "config.json").symlink_to("config.json")
    code, out, err = call("models", "show", loop)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "loop/config.json cannot be read" in err
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 2**41}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = call("models", "show", tmp_path)
    assert (code, out) == (2, "")
    assert "max_position_embeddings is larger than 2^40" in err
    (tmp_path / "config.json").write_text(json.dumps(config).replace(str(2**41), "9" * 5000))
    assert call("models", "show", tmp_path)[0] == 2
    config |= {"hidden_size": 2**38, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text("\ufeff" + json.dumps(config), encoding="utf-8")
    found = document(call, "models", "show", tmp_path)
    assert found["total_params"] > 2**64  # absurd, and still one document


def test_own_figures_of_this_machines_device_count_without_its_name(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = Gpu(0, "NVIDIA L40S", device=find_device("L40S"))
    monkeypatch.setattr("specbench.device.read_gpus", lambda: Gpus((gpu,)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "mine.csv").write_text("id,mem_bw_gb_s\nL40S,432\n")
    plain = document(call, "predict", *LLAMA)
    own = document(call, "predict", *LLAMA, "--devices", tmp_path / "mine.csv")
    assert own["device"] == "L40S"
    assert own["cells"][0]["tpot_s"] > 1.8 * plain["cells"][0]["tpot_s"]


def test_the_answer_says_what_it_rests_on(call: Call) -> None:
    found = document(
        call,
        "predict",
        *LLAMA,
        "--device",
        "RTX-4090",
        "--method",
        "ngram",
        "--k",
        "2,4",
        "--acceptance",
        "0.6",
        "--weights",
        "fp8",
    )
    assert found["profile"] == "fitted on L40S, of the same architecture (Ada sm89)"
    assert any("--coverage" in note for note in found["notes"])
    assert any("upper estimate" in note for note in found["notes"])
    speedups = {cell["k"]: cell["speedup"] for cell in found["cells"]}
    (best,) = found["best_k"]
    assert speedups[best["k"]] == best["speedup"] == max(speedups.values())
    text = call(
        "predict",
        *LLAMA,
        *H100,
        "--method",
        "eagle3",
        "--k",
        "1..4",
        "--batch",
        "1,64",
        "--acceptance",
        "0.75",
    )[1]
    assert "Best k: 4 at batch 1 (" in text
    assert "Constants: fitted to kernel timings of this device" in text


def test_methods_can_be_listed(call: Call) -> None:
    listed = {row["name"]: row for row in document(call, "predict", "--method", "list")}
    assert listed["mtp-relaxed"]["lossless"] == "no"
    assert "held against" in call("predict", "--method", "list")[1]


def test_sparse_axes_are_columns(call: Call) -> None:
    _, out, _ = call("predict", *LLAMA, *H100, "--keep-kv", "0.3,1", "--context", "32Ki")
    assert "keep KV" in out
    assert "speedup" in out

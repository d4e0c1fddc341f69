"""The device catalogue: figures against arithmetic and against each other, names, slices, users' files."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_roofline.device import CONFIDENCE, Device, Figure
from models_roofline.device_lint import doubts
from models_roofline.errors import RooflineError
from models_roofline.hardware import catalogue, find_device, identify, identify_cpu, load_devices

DEVICES = list(catalogue().values())
each_device = pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.id)


def value(name: str, figure: str) -> float:
    return find_device(name).figure(figure).value


def squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9.+]", "", name.lower())


def with_peaks(name: str, **tflops: float) -> Device:
    device = find_device(name)
    return replace(device, figures={**device.figures, **{k: Figure(v * 1e12) for k, v in tflops.items()}})


# --- every row --------------------------------------------------------------------------------------------


@each_device
def test_figures_say_how_sure_they_are(device: Device) -> None:
    for name, figure in device.figures.items():
        assert figure.confidence in CONFIDENCE, name
        assert len(figure.source) > 5, name
        assert figure.value > 0, name


@each_device
def test_nothing_looks_wrong(device: Device) -> None:
    assert doubts(device) == []


@each_device
def test_bandwidth_is_that_of_memory(device: Device) -> None:
    """From two channels of DDR4 to HBM3e: a wrong unit is a factor of 1000."""
    assert 50e9 <= device.bandwidth_bytes_per_s <= 8e12
    if (measured := device.figures.get("measured_bw")) is not None:
        assert 0.4 < measured.value / device.bandwidth_bytes_per_s < 1


@each_device
def test_decimal_nominal_memory_never_promises_too_much(device: Device) -> None:
    seen, nominal = device.figures.get("visible_memory"), device.figures.get("memory")
    if seen and nominal:
        assert 1 <= seen.value / nominal.value < 1.075
        assert device.memory_bytes == seen.value
        assert device.memory_from == "visible_memory"
    elif device.kind != "cpu":
        assert nominal is not None
        assert device.memory_bytes == nominal.value
        assert device.memory_from == "memory"
    else:
        assert device.memory_bytes is None


def test_ids_and_names_are_one_devices_each() -> None:
    spelt = [name for device in DEVICES for name in {squeezed(own) for own in (device.id, *device.names)}]
    assert len(spelt) == len(set(spelt))
    for device in DEVICES:
        for name in (device.id, device.id.lower().replace("-", " "), *device.names):
            assert find_device(name) is device


@pytest.mark.parametrize("device", [d for d in DEVICES if d.kind == "cpu"], ids=lambda d: d.id)
def test_a_cpus_figures_are_arithmetic(device: Device) -> None:
    channels, _, rate = re.fullmatch(r"(\d+) x (DDR\d)-(\d+)", device.memory_type).groups()  # type: ignore[union-attr]
    assert device.bandwidth_bytes_per_s == pytest.approx(int(channels) * int(rate) * 1e6 * 8)
    told = re.findall(r"(\w+): (\d+) cores x ([\d.]+) GHz x (\d+) a cycle", device.notes)
    assert {name for name, *_ in told} == set(device.dtypes)
    for name, cores, clock, per_cycle in told:
        assert device.peak_flops(name) == pytest.approx(
            int(cores) * float(clock) * 1e9 * int(per_cycle), rel=1e-5
        )


# --- what people get wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        *((name, 2.0) for name in ("L4", "L40S", "RTX-4090", "H100-SXM5-80GB", "H20-96GB", "B200-HGX")),
        *((name, 2.0) for name in ("B300-HGX", "RTX-5090", "MI300X", "MI355X", "Gaudi2", "TPU-v7-Ironwood")),
        *((name, 1.0) for name in ("Gaudi3-OAM", "AWS-Inferentia2", "TPU-v5p", "TPU-v6e")),
    ],
)
def test_fp8_to_bf16(name: str, ratio: float) -> None:
    device = find_device(name)
    assert device.peak_flops("fp8") / device.peak_flops("bf16") == pytest.approx(ratio, rel=0.03)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (with_peaks("L40S", fp8=1466), "fp8 is 4.05 × bf16"),
        (with_peaks("H100-SXM5-80GB", bf16=1979), "fp8 is 1.00 × bf16"),
        (with_peaks("H100-SXM5-80GB", bf16=1979, fp8=3958), "16-bit is 29.6 × fp32"),
        (with_peaks("L4", bf16=242, fp8=485), "16-bit is 8.0 × fp32"),
        (with_peaks("RTX-4090", bf16=330.3, fp8=660.6), "fp16 accumulation"),
        (with_peaks("MI210", bf16=362), "sparse"),
    ],
    ids=lambda w: w.id if isinstance(w, Device) else "",
)
def test_sparse_given_as_dense_is_noticed(wrong: Device, said: str) -> None:
    assert said in " ".join(doubts(wrong))


def test_parts_under_one_name_differ() -> None:
    bandwidths = [value(n, "mem_bw") for n in ("H100-PCIe-80GB", "H100-SXM5-80GB", "H100-NVL-94GB")]
    assert bandwidths == [2000e9, 3350e9, 3900e9]
    assert value("H200-SXM5-141GB", "mem_bw") == 4800e9
    assert value("A10", "bf16") == 125e12
    assert value("A10G", "bf16") == 70e12
    assert value("RTX-PRO-6000-Blackwell-Server", "mem_bw") == 1597e9
    assert value("RTX-PRO-6000-Blackwell-WS", "mem_bw") == 1792e9
    hgx, nvl = find_device("B200-HGX"), find_device("GB200-per-GPU")
    assert (hgx.bandwidth_bytes_per_s, hgx.peak_flops("fp4")) == (7.7e12, 9e15)
    assert (nvl.bandwidth_bytes_per_s, nvl.peak_flops("fp4")) == (8e12, 10e15)


def test_ridges() -> None:
    assert find_device("H100-SXM5-80GB").ridge() == pytest.approx(295.3, abs=0.05)
    assert find_device("H200-SXM5-141GB").ridge() == pytest.approx(206.1, abs=0.05)
    assert find_device("H20-96GB").ridge() == 37
    assert find_device("H100-SXM5-80GB").ridge("fp8") == pytest.approx(590.7, abs=0.05)


def test_consumer_peaks_accumulate_in_fp32() -> None:
    peaks = [value(name, "bf16") for name in ("RTX-3090", "RTX-4090", "RTX-5090")]
    assert peaks == [71.2e12, 165.2e12, 209.5e12]


def test_units_that_were_cut_or_never_there() -> None:
    assert value("B300-HGX", "int8") < value("B300-HGX", "bf16") / 10
    assert value("GB300-per-GPU", "int8") < value("GB300-per-GPU", "bf16") / 10
    assert value("MI100", "bf16") == value("MI100", "fp16") / 2
    assert value("MI210", "int8") == value("MI210", "fp16")
    with pytest.raises(
        RooflineError, match=r"--weights: V100-SXM2-32GB has no bf16 peak; it has fp32, fp16, int8\."
    ):
        find_device("V100-SXM2-32GB").peak_flops("bf16")
    with pytest.raises(RooflineError, match="L40S has no fp4 peak"):
        find_device("L40S").peak_flops("fp4")
    with pytest.raises(RooflineError, match="none that is known"):
        find_device("Graviton4").ridge()


def test_an_mi250_is_two_devices() -> None:
    half = find_device("MI250-GCD")
    assert half.bandwidth_bytes_per_s == pytest.approx(3276.8e9 / 2)
    assert half.memory_bytes == 64e9
    with pytest.raises(RooflineError, match="MI250 may be MI250-GCD"):
        find_device("MI250")


def test_links_are_one_direction() -> None:
    links = {"H100-SXM5-80GB": 450, "A100-SXM4-80GB": 300, "H800-SXM5-80GB": 200, "B200-HGX": 900}
    assert {name: find_device(name).link_bytes_per_s for name in links} == {
        name: gb * 1e9 for name, gb in links.items()
    }
    assert find_device("H100-SXM5-80GB").pcie_bytes_per_s == 64e9
    assert find_device("L40S").link_bytes_per_s is None


def test_confidence_stands_on_the_figure() -> None:
    card = find_device("L4")
    assert card.figure("mem_bw").confidence == "V"
    assert "aiconfigurator" in card.figure("mem_bw").source
    assert card.figure("l2").confidence == "D"
    assert "nvidia.com" in card.figure("l2").source
    assert find_device("B300-HGX").figure("fp4").confidence == "E"
    assert find_device("H100-SXM5-80GB").l2_bytes == 50 * 2**20
    with pytest.raises(RooflineError, match="no power is known for H20-96GB; known: memory, "):
        find_device("H20-96GB").figure("power")


# --- names ------------------------------------------------------------------------------------------------

NVML = {
    "NVIDIA H100 80GB HBM3": "H100-SXM5-80GB",
    "NVIDIA H100 PCIe": "H100-PCIe-80GB",
    "NVIDIA H100 NVL": "H100-NVL-94GB",
    "NVIDIA H200": "H200-SXM5-141GB",
    "NVIDIA H200 NVL": "H200-NVL-141GB",
    "NVIDIA H800": "H800-SXM5-80GB",
    "NVIDIA H20": "H20-96GB",
    "NVIDIA A100-SXM4-80GB": "A100-SXM4-80GB",
    "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
    "NVIDIA A100-PCIE-40GB": "A100-PCIe-40GB",
    "NVIDIA A100 80GB PCIe": "A100-PCIe-80GB",
    "A100-SXM4-40GB": "A100-SXM4-40GB",
    "NVIDIA GH200 480GB": "GH200-96GB",
    "NVIDIA GB200": "GB200-per-GPU",
    "NVIDIA B300 SXM6 AC": "B300-HGX",
    "NVIDIA GB10": "DGX-Spark-GB10",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
    "GeForce RTX 3090": "RTX-3090",
    "NVIDIA GeForce RTX 5090": "RTX-5090",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX-PRO-6000-Blackwell-Server",
    "NVIDIA RTX A6000": "RTX-A6000",
    "Tesla T4": "T4",
    "NVIDIA TITAN X (Pascal)": "TITAN-X-Pascal",
    "NVIDIA A100-SXM4-80GB MIG 3g.40gb": "A100-SXM4-80GB MIG 3g.40gb",
}
"""As NVML and public nvidia-smi listings spell them."""


@pytest.mark.parametrize(("name", "expected"), NVML.items(), ids=NVML)
def test_a_drivers_name_is_one_device(name: str, expected: str) -> None:
    found = identify(name)
    assert found.device is not None, found.reason
    assert found.device.id == expected
    assert found.reason is None
    assert identify(f"  {name.upper()} ").device == found.device or "MIG" in name


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100", "NVIDIA Graphics Device", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
        "NVIDIA T400", "NVIDIA H20-3e", "NVIDIA L20X", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA A100", "NVIDIA A100-SXM...", "GRID A100X-40C", "NVIDIA L40S-24C", "NVIDIA A10-24Q", "", None,
        "NVIDIA L4 MIG 1g.6gb", "NVIDIA A30 MIG 7g.24gb", "NVIDIA H100 MIG 3g.40gb",
    ],
)  # fmt: skip
def test_another_name_is_no_device_and_says_so(name: str | None) -> None:
    found = identify(name)
    assert found.device is None
    assert found.reason
    assert "--device" in found.reason


def test_a_bare_name_lists_what_it_may_be() -> None:
    assert "H100-PCIe-80GB, H100-SXM5-80GB, H100-NVL-94GB" in (identify("NVIDIA H100").reason or "")
    assert "virtual GPU" in (identify("GRID A100X-40C").reason or "")


def test_the_memory_must_fit_the_name() -> None:
    assert identify("NVIDIA GeForce RTX 4090", 24564).device is find_device("RTX-4090")
    assert identify("NVIDIA A40", 49140).device is find_device("A40")
    assert identify("NVIDIA GB10", 122_570).device is find_device("DGX-Spark-GB10")
    modded = identify("NVIDIA GeForce RTX 4090", 49140)
    assert modded.device is None
    assert "another board" in (modded.reason or "")


@given(st.text() | st.from_regex(r"(NVIDIA )?[ABHL]\d{1,3}[A-Z]?( MIG \dg\.\d\dgb)?", fullmatch=True))
def test_any_name_is_a_device_or_a_reason(name: str) -> None:
    found = identify(name)
    assert (found.device is None) == (found.reason is not None)
    assert (identify_cpu(name).device is None) == (identify_cpu(name).reason is not None)


def test_cpus_by_model_name() -> None:
    assert identify_cpu("AMD EPYC 9654 96-Core Processor").device is find_device("EPYC-9654")
    assert identify_cpu("INTEL(R) XEON(R) PLATINUM 8592+").device is find_device("Xeon-Platinum-8592+")
    assert "AMD EPYC is not a CPU" in (identify_cpu("AMD EPYC").reason or "")
    assert identify("AMD EPYC 9654 96-Core Processor").device is None
    assert identify_cpu("NVIDIA H200").device is None


def test_a_part_of_a_name_is_never_guessed() -> None:
    with pytest.raises(
        RooflineError, match=r"H100-PCIe-80GB or H100-SXM5-80GB or H100-NVL-94GB; name it in full"
    ):
        find_device("H100")
    with pytest.raises(RooflineError, match="may be Apple-M3-Max-40c"):
        find_device("M3 Max")
    with pytest.raises(
        RooflineError, match=r"'H9000' is not in the catalogue; near names: .*; .*--devices FILE"
    ):
        find_device("H9000")
    assert find_device("rtx 4090").id == find_device("RTX4090").id == "RTX-4090"


# --- MIG: shares from NVIDIA's MIG user guide, "Supported MIG Profiles" ---------------------------------------


@pytest.mark.parametrize(
    ("name", "compute", "memory"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 1 / 7, 1 / 8),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb+me", 1 / 7, 1 / 8),
        ("NVIDIA A100-SXM4-40GB MIG 2g.10gb", 2 / 7, 2 / 8),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 3 / 7, 4 / 8),
        ("NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb", 1 / 7, 4 / 8),
        ("NVIDIA A100-SXM4-80GB MIG 4g.40gb", 4 / 7, 4 / 8),
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 1, 1),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 1 / 7, 1 / 8),
        ("NVIDIA H100 80GB HBM3 MIG 1g.20gb", 1 / 7, 2 / 8),
        ("NVIDIA H200 MIG 1g.18gb", 1 / 7, 1 / 8),
        ("NVIDIA H200 MIG 2g.35gb", 2 / 7, 2 / 8),
        ("NVIDIA B200 MIG 3g.90gb", 3 / 7, 4 / 8),
        ("NVIDIA A30 MIG 2g.12gb", 2 / 4, 2 / 4),
        ("NVIDIA A30 MIG 4g.24gb", 1, 1),
    ],
)
def test_a_slice_is_a_share_of_its_card(name: str, compute: float, memory: float) -> None:
    card, part = identify(name.partition(" MIG")[0]).device, identify(name).device
    assert card is not None
    assert part is not None
    assert part.peak_flops("bf16") == pytest.approx(compute * card.peak_flops("bf16"))
    assert part.bandwidth_bytes_per_s == pytest.approx(memory * card.bandwidth_bytes_per_s)
    assert part.memory_bytes == pytest.approx(memory * (card.memory_bytes or 0))
    assert part.link_bytes_per_s is None
    assert part.power_w is None
    assert find_device(part.id) == part


# --- users' files -----------------------------------------------------------------------------------------


def test_a_users_file_adds_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        "# measured here\nid,kind,mem_bw_gb_s,bf16_tflops,names\nmy-npu,accelerator,120,32,NPU One|NPU 1\n"
        "L40S,,749,,\n"
    )
    grown = tmp_path / "grown.csv"
    grown.write_text("\ufeffid,memory_gb\nRTX-4090,48\n", encoding="utf-8")
    assert find_device("RTX-4090", extra=grown).memory_bytes == 48e9
    npu = find_device("NPU one", extra=path)
    assert (npu.id, npu.kind, npu.bandwidth_bytes_per_s, npu.ridge()) == (
        "my-npu", "accelerator", 120e9, 32e12 / 120e9,
    )  # fmt: skip
    assert npu.figure("mem_bw") == Figure(120e9, "U", "mine.csv, line 3")
    card = find_device("L40S", extra=path)
    assert card.bandwidth_bytes_per_s == 749e9
    assert card.peak_flops("fp8") == 733e12
    assert find_device("L40S").bandwidth_bytes_per_s == 864e9
    assert find_device("H100-SXM5-80GB", extra=path) is find_device("H100-SXM5-80GB")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("d.toml", '[[device]]\nid = "x"\nmem_bw_gb_s = 90\nunified = true\nnames = ["X one"]\nyear = 2024\n'),
        ("d.json", '[{"id": "x", "mem_bw_gb_s": 90.0, "unified": true, "names": ["X one"], "year": 2024}]'),
        ("d.json", '{"device": [{"id": "x", "mem_bw_gb_s": 90, "unified": "yes", "names": "X one", "year": "2024"}]}'),
    ],
)  # fmt: skip
def test_other_formats_hold_the_same(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    (device,) = load_devices(tmp_path / name).values()
    assert device == Device(
        "x", unified=True, names=("X one",), year=2024, figures={"mem_bw": Figure(90e9, "U", f"{name}, device 1")}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,mem_bw_gb_s\nx,fast\n", r"d.csv, line 2: mem_bw_gb_s 'fast' is not a number"),
        ("id,mem_bw_gb_s\nx,N/A\n", r"mem_bw_gb_s 'N/A' is not a number; leave it empty if unknown"),
        ("id,mem_bw_gb_s\nx,3350000\n", r"line 2: mem_bw_gb_s 3.35e\+06 is not within 10 to 20000; check the unit"),
        ("id,mem_bw_gb_s\nx,nan\n", r"mem_bw_gb_s nan is not within"),
        ("id,mem_bw_gb_s\nx,-1\n", r"mem_bw_gb_s -1 is not within"),
        ("id,mem_bw_gbs\nx,100\n", r"unknown column 'mem_bw_gbs'; did you mean mem_bw_gb_s\?"),
        ("id,bf16_tflops\nx,100\n", r"line 2: mem_bw_gb_s of x is missing"),
        ("id,mem_bw_gb_s\n\n,100\n", r"line 3: id is missing"),
        ("id,mem_bw_gb_s\nx,100\nx,100\n", r"line 3: id x stands twice"),
        ("id,id,mem_bw_gb_s\nx,y,100\n", r"line 1: column id stands twice"),
        pytest.param(f"id,mem_bw_gb_s\n{'x' * 200_000},100\n", r"line 2: is not CSV", id="a cell without end"),
        ("id,mem_bw_gb_s\nx,100,7\n", r"^d.csv, line 2: 3 cells under 2 columns"),
        ("id,kind,mem_bw_gb_s\nx,tpu,100\n", r"kind 'tpu' is not one of gpu, cpu, accelerator"),
        ("id,unified,mem_bw_gb_s\nx,maybe,100\n", r"unified 'maybe' is not one of"),
        ("id,confidence,mem_bw_gb_s\nx,sure,100\n", r"confidence 'sure' is not a letter of V, S, A, D, E, U"),
        ("id,confidence,mem_bw_gb_s\nx,D; V fp8,100\n", r"confidence names fp8, which the row does not give"),
        ("id,mem_bw_gb_s\n", r"d.csv: holds no device"),
    ],
)  # fmt: skip
def test_errors_say_file_place_and_column(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "d.csv"
    path.write_text(text)
    with pytest.raises(RooflineError, match=said):
        load_devices(path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.csv", None, r"--devices: .*none.csv cannot be read"),
        ("d.json", "{", r"--devices: d.json is not readable as json"),
        pytest.param("d.json", "[" * 100_000, r"--devices: d.json is not readable as json", id="too deep"),
        ("d.txt", "x", r"--devices: d.txt must end in .csv, .toml, .json"),
        ("d.toml", "x = ", r"--devices: d.toml is not readable as toml"),
        ("d.json", '{"id": "x"}', r"devices must be a list"),
        ("d.toml", "[device]\nid = 'x'\n", r"devices must be a list"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(RooflineError, match=said):
        load_devices(tmp_path / name)


def test_text_lines_of_a_source_keep_their_letters(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text(
        "id,mem_bw_gb_s,l2_mib,confidence,source\nx,100,2,D; V l2,D sheet; page 3; V https://e.org\ny,90,1,E,a guess\n"
    )
    first, second = load_devices(path).values()
    assert first.figure("mem_bw") == Figure(100e9, "D", "sheet; page 3")
    assert first.figure("l2") == Figure(2**21, "V", "https://e.org")
    assert second.figure("l2") == Figure(2**20, "E", "a guess")

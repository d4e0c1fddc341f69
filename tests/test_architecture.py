"""The floors of the house: imports only go down, and `--help` loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import specbench

ROOT = Path(__file__).parent.parent
PACKAGES = ("specbench", "workloads", "models_roofline", "runners", "reports")
ALLOWED = {
    "workloads": {"workloads"},
    "models_roofline": {"models_roofline"},
    "specbench": {"specbench", "workloads", "models_roofline"},
    "runners": {"runners", "specbench", "workloads", "models_roofline"},
    "reports": {"reports", "specbench", "workloads", "models_roofline"},
    "specbench.cli": set(PACKAGES),
}
HEAVY = {
    "numpy", "pandas", "pyarrow", "scipy", "matplotlib", "jinja2", "pydantic", "rich", "httpx", "orjson", "httptools",
    "uvloop", "zstandard", "tokenizers", "huggingface_hub", "pynvml", "psutil", "torch", "asyncio",
}  # fmt: skip


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def floor_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    roof = parts[:2] in (("specbench", "cli"), ("specbench", "__main__.py"))
    return "specbench.cli" if roof else parts[0]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_go_down(path: Path) -> None:
    floor = floor_of(path)
    ours = {name for name in imported(path) if name.split(".")[0] in PACKAGES}
    assert {name.split(".")[0] for name in ours} <= ALLOWED[floor]
    if floor != "specbench.cli":
        assert not [name for name in ours if name.startswith("specbench.cli")]


def test_every_package_is_seen() -> None:
    assert {floor_of(path) for path in modules()} == set(ALLOWED)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["demo", "--help"], ["models", "--help"]]
)
def test_help_loads_no_heavy_module(arguments: list[str]) -> None:
    code = (
        "import sys; sys.argv=['specbench', *sys.argv[1:]]\n"
        "from specbench.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('\\n'.join(sorted({m.split('.')[0] for m in sys.modules})), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "Usage" in done.stdout
    loaded = set(done.stderr.split())
    assert "typer" in loaded
    # typer itself checks a command's parameters with pydantic; the top level has none to check.
    assert not loaded & (HEAVY if len(arguments) == 1 else HEAVY - {"pydantic"})
    assert not loaded & {"runners", "reports", "workloads", "models_roofline"}


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """Importing `specbench.x` binds the module as `specbench.x`, over a function that is offered there."""
    names = {path.stem for path in (ROOT / "specbench").iterdir()}
    assert not names & set(specbench.__all__)
    assert all(callable(getattr(specbench, name)) for name in specbench.__all__ if name != "__version__")

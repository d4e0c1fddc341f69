"""What several test modules share: the command line, and the small real model where a test needs it."""

import sys
from collections.abc import Callable

import pytest

from specbench import cli, models
from specbench.errors import SpecbenchError

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command in this process: its arguments in, exit code, stdout and stderr out."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["specbench", *map(str, args)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def model() -> str:
    """Path of smollm2-135m. On a machine that cannot fetch it the test is skipped and says why."""
    pytest.importorskip("xllamacpp")
    try:
        return str(models.fetch("smollm2-135m"))
    except SpecbenchError as error:
        pytest.skip(f"the small model is not here and cannot be fetched: {error}")

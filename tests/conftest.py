"""What several test modules share: the small real model, fetched once and only where a test needs it."""

import pytest

from specbench import models
from specbench.errors import SpecbenchError


@pytest.fixture(scope="session")
def model() -> str:
    """Path of smollm2-135m. On a machine that cannot fetch it the test is skipped and says why."""
    pytest.importorskip("xllamacpp")
    try:
        return str(models.fetch("smollm2-135m"))
    except SpecbenchError as error:
        pytest.skip(f"the small model is not here and cannot be fetched: {error}")

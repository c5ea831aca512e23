"""Settings all tests share."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.support.evaluations import undrawn  # noqa: F401 (a fixture)
from tests.support.trained import runs  # noqa: F401 (a fixture)

# Two test workers on two cores: one thread each is faster than four fighting.
torch.set_num_threads(1)

settings.register_profile("segcal", deadline=None, derandomize=True)
settings.load_profile("segcal")


def pytest_configure(config: pytest.Config) -> None:
    """Before the test workers start: import yapf, which mmengine needs, once.

    Its first import after an installation writes a file, and another process could read half of it.
    """
    if not hasattr(config, "workerinput"):
        with suppress(ImportError):
            import yapf  # noqa: F401


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets; tests that need it skip where it is absent."""
    default = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("SEGCAL_SHARED_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder} (set SEGCAL_SHARED_DATA)")
    return folder

"""What all tests share."""

import os

import pytest

from lfm2.environment import default_device, ensure_compiler


def pytest_configure() -> None:
    """Lets tests that use tinygrad without `lfm2.load` find the compiler too."""
    ensure_compiler(default_device())


@pytest.fixture(scope="session")
def steps(tmp_path_factory):
    """A folder of compiled steps, so that a form is compiled once for all tests."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # What the processes of a run have in common.
        folder = folder.parent
    (folder / "steps").mkdir(exist_ok=True)
    return folder / "steps"

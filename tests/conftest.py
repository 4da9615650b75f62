"""What all tests share."""

import pytest

from lfm2.environment import default_device, ensure_compiler


def pytest_configure() -> None:
    """Lets tests that use tinygrad without `lfm2.load` find the compiler too."""
    ensure_compiler(default_device())


@pytest.fixture(scope="session")
def steps(tmp_path_factory):
    """A folder of compiled steps, so that a form is compiled once for all tests."""
    return tmp_path_factory.mktemp("steps")

import pytest

from tests.tiny import tiny_sd3


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a very small SD3 pipeline."""
    return tiny_sd3(tmp_path_factory.mktemp("tiny") / "sd3")

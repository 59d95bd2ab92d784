"""The conditions every test runs under: one thread, no hub, no network (see addopts), nothing random, no compiler."""

import os

# before any import reads them; subprocesses inherit them
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
if os.environ.get("FLOWRL_TEST_DEVICE", "cpu") == "cpu":  # where kernels cannot be compiled
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # also fills torch.empty with NaN, so unwritten output shows
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _same_weights_in_any_order():
    """Freshly initialised modules are the same whichever tests ran before."""
    torch.manual_seed(0)

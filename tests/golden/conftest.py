"""Numbers of the authors' public code. FLOWRL_GOLDEN names another folder of the same fixtures."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(os.environ.get("FLOWRL_GOLDEN", Path(__file__).parents[1] / "data" / "golden"))


@pytest.fixture(scope="session")
def golden():
    """Name of a fixture -> its JSON, or its arrays as tensors with every float in float64."""

    def load(name):
        if name.endswith(".json"):
            return json.loads((FOLDER / name).read_text())
        with np.load(FOLDER / name) as file:
            arrays = {key: file[key] for key in file.files if file[key].dtype.kind in "fib"}
        return {
            key: torch.from_numpy(value.astype("f8") if value.dtype.kind == "f" else value)
            for key, value in arrays.items()
        }

    return load


@pytest.fixture(scope="session")
def assert_golden():
    """Compare with an error relative to the largest number of the expected array."""

    def check(got, want, tol):
        assert got.shape == want.shape
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error <= tol, f"relative error {error:.2e} > {tol:.0e}"

    return check

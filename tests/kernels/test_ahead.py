"""The kernels compile for real chips, fit their shared memory and keep everything in registers; no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes of shared memory that a block may have
DIMS = ("32", "64", "128")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", SHARED)
def test_kernels_fit_the_chip(arch, dtype, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name("ahead.py"), str(arch), dtype, *DIMS]
    done = subprocess.run(command, env={**env, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    attention = {(f"{name}_kernel", dim) for name in ("forward", "query", "key") for dim in DIMS}
    assert {(row["kernel"], str(row["dim"])) for row in rows} == attention | {
        ("step_kernel", "0"),
        ("pull_kernel", "0"),
    }
    for row in rows:
        assert row["shared"] <= SHARED[arch] and row["spilled"] == 0, row

"""Compile Triton's kernels ahead of time, without a GPU, and print what each asks of the chip as a line of JSON.

The arguments are the architecture, the data type and the head dimensions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flowrl_kernels.sde_step import kernel as sde_step
from flowrl_kernels.shared_context import kernel, launch

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
OTHER = {
    **dict.fromkeys(("CONTEXT", "MEMBERS", "FIRST", "ROW"), "*i64"), "MASK": "*i8", "scale": "fp32",
    **dict.fromkeys(("LSE", "DELTA", "PART", "G", "ACC", "DT", "PULL", "REST", "STD"), "*fp32"),
}  # fmt: skip
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


def compiled(fn, element: str, tiles: dict[str, int], arch: int):
    """Of kernel `fn` as a launch of dense tensors specialises it."""
    options = {name: tiles.pop(name) for name in ("num_warps", "num_stages") if name in tiles}
    signature, aligned = {}, {}
    for i, name in enumerate(fn.arg_names):
        kind = "constexpr" if name in tiles else OTHER.get(name, "i32" if name[0] in "sLHn" else f"*{element}")
        signature[name] = kind
        if kind[0] == "*" or (re.fullmatch("s..", name) and name != "smb"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(fn, signature, tiles, aligned), target=GPUTarget("cuda", arch, 32), options=options)


def spilled(ptx: str) -> int:
    """Bytes of registers that the assembler had to store elsewhere."""
    target = re.search(r"\.target (\S+)", ptx).group(1)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        command = [PTXAS, "-v", "--gpu-name", target, f.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", said).group(1))


if __name__ == "__main__":
    arch, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
    attention = (kernel.forward_kernel, kernel.query_kernel, kernel.key_kernel)
    asked = [
        (fn, dim, {"HAS_MASK": True, **launch.tiles_of(dtype, dim)})
        for dim in map(int, sys.argv[3:])
        for fn in attention
    ]
    block = {"BLOCK": sde_step.BLOCK}
    asked += [(sde_step.step_kernel, 0, {"DRAW": True, **block}), (sde_step.pull_kernel, 0, block)]
    for fn, dim, tiles in asked:
        made = compiled(fn, TYPES[dtype], dict(tiles), arch)
        asks = {"shared": made.metadata.shared, "spilled": spilled(made.asm["ptx"])}
        print(json.dumps({"kernel": fn.__name__, "dim": dim, **asks}), flush=True)

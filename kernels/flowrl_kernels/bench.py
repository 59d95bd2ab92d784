"""Time and memory of one cross-attention layer whose context is shared, against what stock code does.

Every variant runs in a process of its own. Nothing is reported unless all of them agree with the definition, in value
and in every gradient. `repeated` is the stock layer: the context is repeated for each sample, and projected there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from flowrl_kernels.backend import why_not_triton
from flowrl_kernels.shared_context import shared_context_attention, xformers

SHARED = ("sdpa", "fold", "triton", "xformers")  # with keys and values of P contexts
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
REPEATS = 7


class Wrong(RuntimeError):
    """A variant that is to be timed does not compute what the definition does."""


@dataclass(frozen=True)
class Case:
    """Sizes of a layer; `projections` counts those of keys, values, queries and output, and their gradients, in."""

    prompts: int = 4
    samples: int = 16
    image: int = 64  # tokens of a sample
    text: int = 300  # tokens of a prompt
    width: int = 512
    heads: int = 8
    dtype: str = "float32"
    device: str = "cpu"
    projections: bool = True


def cases(device: str = "auto", dtype: str = "auto") -> list[Case]:
    """The layer with its projections and the attention alone, at the sizes that RL at low resolution has.

    ValueError: a device or a type that is not there.
    """
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = here if device == "auto" else device
    dtype = ("bfloat16" if device == "cuda" else "float32") if dtype == "auto" else dtype
    if device not in ("cpu", here):
        raise ValueError(f"device is {device!r}: this machine has {here}")
    if dtype not in TOLERANCE:
        raise ValueError(f"dtype is {dtype!r}: it must be one of {', '.join(TOLERANCE)}")
    return [Case(device=device, dtype=dtype, projections=projections) for projections in (True, False)]


class Layer(nn.Module):
    """The stock layer's projections around an attention that is chosen by name."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(case.width, case.width, bias=False) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.case.heads, -1)).transpose(1, 2)

    def forward(self, variant: str, x: Tensor, text: Tensor, row: Tensor) -> Tensor:
        """x [B, image, width], text [P, text, width], row [B] -> as x."""
        if variant == "repeated":
            text = text[row]
        q, k, v = (self.heads(part) for part in (self.to_q(x), self.to_k(text), self.to_v(text)))
        return self.to_out(attend(variant, q, k, v, row).transpose(1, 2).flatten(2))


def attend(variant: str, q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> Tensor:
    if variant == "repeated":
        return scaled_dot_product_attention(q, k, v)
    return shared_context_attention(q, k, v, row, back_end=variant)


def subject(case: Case, variant: str) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """(a forward, the tensors whose gradients a backward must give), the same numbers for every variant."""
    dtype = getattr(torch, case.dtype)
    torch.manual_seed(0)
    layer = Layer(case).to(case.device, dtype)
    row = torch.arange(case.prompts, device=case.device).repeat_interleave(case.samples)
    x = torch.randn(len(row), case.image, case.width).to(case.device, dtype).requires_grad_()
    text = torch.randn(case.prompts, case.text, case.width).to(case.device, dtype)
    if case.projections:
        return lambda: layer(variant, x, text, row), [x, *layer.parameters()]
    k, v = (layer.heads(part(text)).detach() for part in (layer.to_k, layer.to_v))
    if variant == "repeated":  # that they are there already is to its advantage
        k, v = k[row], v[row]
    q, k, v = (part.contiguous().requires_grad_() for part in (layer.heads(x.detach()), k, v))
    return lambda: attend(variant, q, k, v, row), [q, k, v]


def available(case: Case) -> list[str]:
    """The variants that can run here."""
    q = torch.empty(0, case.width // case.heads, dtype=getattr(torch, case.dtype), device=case.device)
    why_not = {"triton": why_not_triton(q), "xformers": xformers.why_not(q)}
    return ["repeated", *(name for name in SHARED if not why_not.get(name))]


def disagreement(case: Case, variant: str) -> float:
    """The largest relative root mean square by which value and gradients differ from the definition in float64."""
    found = []
    for dtype, name in ((case.dtype, variant), ("float64", "naive")):
        forward, leaves = subject(Case(**{**asdict(case), "dtype": dtype}), name)
        out = forward()
        g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        found.append([out, *torch.autograd.grad(out, leaves, g)])
    if not case.projections and variant == "repeated":
        found = [some[:2] for some in found]  # its keys are others
    return max(_rms(one - other) / _rms(other) for one, other in zip(*found, strict=True))


def _rms(x: Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item()


def timed(case: Case, variant: str) -> dict[str, float]:
    """Median seconds of a forward and of forward and backward, and the peak of live tensor bytes of the latter."""
    forward, leaves = subject(case, variant)

    def both() -> None:
        torch.autograd.grad(forward().square().mean(), leaves)

    with torch.no_grad():
        seconds = _median(forward, case.device)
    return {"forward_s": seconds, "both_s": _median(both, case.device), "peak_bytes": peak(both, case.device)}


def _median(run: Callable[[], Any], device: str) -> float:
    def once() -> float:
        begun = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    for _ in range(2):
        once()
    return median(once() for _ in range(REPEATS))


def peak(run: Callable[[], Any], device: str) -> int:
    """Bytes of tensors that are live at once while it runs, beyond those that were there, by the profiler's records."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        run()
    kind = torch.profiler.DeviceType.CUDA if device == "cuda" else torch.profiler.DeviceType.CPU
    records: Any = profiler.profiler
    events = [e for e in records.kineto_results.events() if e.name() == "[memory]" and e.device_type() == kind]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def counted(case: Case, variant: str) -> dict[str, float]:
    """FLOP and the least bytes that forward and backward must move: each input, output and gradient once."""
    rows = case.prompts * case.samples
    contexts = rows if variant == "repeated" else case.prompts
    attention = 4 * rows * case.image * case.text * case.width
    projections = 4 * (rows * case.image + contexts * case.text) * case.width**2 if case.projections else 0
    # a backward costs twice the products of a projection, of attention two and a half with the scores again; the text
    # asks for no gradient of its own
    spared = 4 * contexts * case.text * case.width**2 if case.projections else 0
    size = 2 if "16" in case.dtype else 4
    elements = 2 * rows * case.image * case.width + 2 * contexts * case.text * case.width
    return {"flop": 3.5 * attention + 3 * projections - spared, "bytes": 2 * size * elements}


def peaks(case: Case) -> dict[str, float]:
    """What the device reaches in this run: FLOP a second of a large product, bytes a second of a large copy."""
    dtype, n = getattr(torch, case.dtype), 8192 if case.device == "cuda" else 1536
    a, b = torch.randn(2, n, n, device=case.device).to(dtype)
    source = torch.empty(1 << (30 if case.device == "cuda" else 27), dtype=torch.uint8, device=case.device)
    copied = _median(lambda: source.clone(), case.device)
    return {"flop_s": 2 * n**3 / _median(lambda: a @ b, case.device), "byte_s": 2 * source.numel() / copied}


def measure(case: Case) -> dict[str, Any]:
    """All variants of a case. Wrong: one of them is, so that no time means anything."""
    names = available(case)
    off = {name: disagreement(case, name) for name in names}
    for name, value in off.items():
        if not value <= TOLERANCE[case.dtype]:
            raise Wrong(f"{name} differs from the definition by {value:.1e}: nothing is reported")
    top, rows = peaks(case), {}
    for name in names:
        command = [sys.executable, "-m", "flowrl_kernels.bench", name, json.dumps(asdict(case))]
        done = subprocess.run(command, capture_output=True, text=True)  # the profiler is noisy
        if done.returncode:
            raise RuntimeError(done.stderr)
        row = json.loads(done.stdout)
        some = counted(case, name)
        least = max(some["flop"] / top["flop_s"], some["bytes"] / top["byte_s"])
        rows[name] = {**row, **some, "roofline": least / row["both_s"], "off": off[name]}
    first = rows["repeated"]
    for row in rows.values():
        row["speedup"] = first["both_s"] / row["both_s"]
        row["forward_speedup"] = first["forward_s"] / row["forward_s"]
        row["memory"] = first["peak_bytes"] / row["peak_bytes"]
    return {
        "case": asdict(case),
        "device": device_name(case.device),
        "torch": torch.__version__,
        **top,
        "variants": rows,
    }


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} CPU threads"


def table(result: dict[str, Any]) -> str:
    """A measurement to read, one line a variant."""
    c = result["case"]
    kind = "layer with its projections" if c["projections"] else "attention alone"
    titles = f"{'forward ms':>12}{'both ms':>10}{'speedup':>9}{'peak MB':>9}{'memory':>8}{'GFLOP':>8}{'roofline':>10}"
    lines = [
        f"{kind}: {c['prompts']} prompts x {c['samples']} samples, {c['image']} image and {c['text']} text tokens, "
        f"width {c['width']}, {c['heads']} heads, {c['dtype']}, {result['device']}, torch {result['torch']}",
        f"{'':10}{titles}",
    ]
    for name, row in result["variants"].items():
        lines.append(
            f"{name:10}{1e3 * row['forward_s']:12.2f}{1e3 * row['both_s']:10.2f}{row['speedup']:8.2f}x"
            f"{row['peak_bytes'] / 1e6:9.1f}{row['memory']:7.2f}x{row['flop'] / 1e9:8.1f}{row['roofline']:10.0%}"
        )
    return "\n".join(lines)


def rows(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One flat row a case and variant, as for a file of comma-separated values."""
    return [
        {**result["case"], "device": result["device"], "torch": result["torch"], "variant": name, **row}
        for result in results
        for name, row in result["variants"].items()
    ]


if __name__ == "__main__":
    json.dump(timed(Case(**json.loads(sys.argv[2])), sys.argv[1]), sys.stdout)

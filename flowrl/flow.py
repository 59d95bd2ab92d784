"""The mathematics of the path: where a point lies between data and noise, and how one step moves it.

    x_t = (1 - t) x0 + t eps,    v = eps - x0,    t = 1 is noise

Every kernel is the Euler step of the flow, a pull along the predicted noise, and fresh noise:

    x' ~ N(mean, std^2),    mean = x + (t' - t) v + pull eps_hat,    eps_hat = x + (1 - t) v

so eta = 0 is the ODE bit for bit. A kernel is its pull and its std: functions of the B numbers t, t', eta and of `cap`,
worked out in float64, since 1 - t cancels near noise. Elements are in float32, or in float64 where the caller's are.

Shape letters: B rows of a batch, *L one packed latent.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from flowrl_kernels import sde_step

KernelName = Literal["ode", "flow_sde", "dance", "cps", "precise", "edm_churn"]
Kernel = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def wide(x: Tensor) -> Tensor:
    """x in float32, or as it is where it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def like(values: Tensor, x: Tensor) -> Tensor:
    """values [B] as [B, 1, ...], ready to be multiplied with x [B, *L] in x's dtype, float32 at least."""
    return values.to(torch.promote_types(x.dtype, torch.float32)).view(-1, *[1] * (x.ndim - 1))


def mean_sq(x: Tensor) -> Tensor:
    """[B] mean of x^2 over the elements of a row."""
    return wide(x).square().flatten(1).mean(1)


def interpolate(x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """x_t = (1 - t) x0 + t eps, [B, *L]."""
    return like(1 - t, x0) * x0 + like(t, eps) * eps


def clean(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """x0_hat = x - t v, [B, *L]: the data that velocity v predicts at x."""
    return x - like(t, x) * v


def noise(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """eps_hat = x + (1 - t) v, [B, *L]: the noise that velocity v predicts at x."""
    return x + like(1 - t, x) * v


def vp_scale(t: Tensor) -> Tensor:
    """1 / (alpha + sigma) of a variance-preserving path, whose latents times it are states; 1 at t = 0 and t = 1."""
    return ((1 - t).square() + t.square()).sqrt()


def ode(t: Tensor, t_next: Tensor, eta: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Euler step of the flow: pull = std = 0, whatever eta is."""
    return torch.zeros_like(t), torch.zeros_like(t)


def flow_sde(t: Tensor, t_next: Tensor, eta: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Flow-GRPO (2505.05470): s = eta sqrt(t / (1 - t)), pull = s^2 dt / 2t, std = s sqrt(-dt).

    Keeps the marginals as the grid is refined; eta = sqrt(2) is the memoryless SDE of adjoint matching. At t = 1 the
    authors take the second grid time in the place of t where s divides by 1 - t: that is `cap`.
    """
    dt = t_next - t
    rate = eta.square() / (1 - t.clamp(max=cap))  # s^2 / t
    return rate * dt / 2, (rate * t * -dt).sqrt()


def dance(t: Tensor, t_next: Tensor, eta: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """DanceGRPO (2505.07818): constant noise level, pull = eta^2 dt / 2t, std = eta sqrt(-dt)."""
    dt = t_next - t
    return eta.square() * dt / (2 * t), eta * (-dt).sqrt()


def cps(t: Tensor, t_next: Tensor, eta: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Flow-CPS (2509.05952): x' = (1 - t') x0_hat + t' (cos eps_hat + sin z), of the angle eta pi / 2.

    Exact where x0_hat is (data of one point), otherwise it narrows the marginals, whatever the grid.
    """
    angle = eta * (math.pi / 2)
    return t_next * (angle.cos() - 1), t_next * angle.sin()


def precise(t: Tensor, t_next: Tensor, eta: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """PRECISE (2605.23522): x' = (1 - t') x0_hat + t' (rho eps_hat + sqrt(1 - rho^2) z).

    rho = [t' (1 - t) / (t (1 - t'))]^(eta^2 / 2), with `cap` in the place of t = 1 in 1 - t. Deterministic at t' = 0.
    """
    odds = t_next * (1 - t.clamp(max=cap)) / (t * (1 - t_next))
    rho = odds.pow(eta.square() / 2)
    return t_next * (rho - 1), t_next * (1 - rho.square()).sqrt()


def edm_churn(t: Tensor, t_next: Tensor, eta: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Churn of FDFO (2603.12893): x' = (1 - t') x0_hat + t' (kept eps_hat + sqrt(1 - kept^2) z).

    kept = 1 / (1 + eta). It is the ODE's step to r = t' / (1 + eta - eta t'), whose noise is then raised by the factor
    1 + eta: x' = (x + (r - t) v + r sqrt((1 + eta)^2 - 1) z) / (1 + eta r). Exact where x0_hat is, as cps.
    """
    kept = 1 / (1 + eta)
    return t_next * (kept - 1), t_next * kept * (eta * (2 + eta)).sqrt()


KERNELS: dict[str, Kernel] = {
    "ode": ode,
    "flow_sde": flow_sde,
    "dance": dance,
    "cps": cps,
    "precise": precise,
    "edm_churn": edm_churn,
}


def step(
    kernel: str, x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, eta: Tensor, cap: float, spread: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """Mean [B, *L] and std [B] of one step from t to t_next < t under `kernel`.

    x, v [B, *L]; t, t_next, eta [B]; `spread` [B] multiplies the std and leaves the mean. `cap` is the second time of a
    grid that begins at 1, and 1 for any other grid: kernels read min(t, cap) in the place of t where they would divide
    by 1 - t. A step of std 0 has no density.
    """
    dt, pull, rest, std = numbers(kernel, x, t, t_next, eta, cap, spread)
    return x + like(dt, x) * v + like(pull, x) * (x + like(rest, x) * v), std


def draw(
    kernel: str, x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, eta: Tensor, cap: float, spread: Tensor | float,
    row: Tensor, z: Tensor, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x_next [E, *L] in `dtype` by noise z [E, *L] from the rows [E], and its log-prob [E]; the rest as in `step`."""
    some = numbers(kernel, x, t, t_next, eta, cap, spread)
    x_next, square = sde_step(x, v, *some, row, noise=z, dtype=dtype)
    return x_next, LOG_PROBS[kernel](square, some[-1][row])


def replay(
    kernel: str, x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, eta: Tensor, cap: float, spread: Tensor | float,
    row: Tensor, x_next: Tensor,
) -> Tensor:  # fmt: skip
    """[E] the log-prob of given x_next [E, *L], bit for bit what `draw` returned with it; differentiable in v."""
    some = numbers(kernel, x, t, t_next, eta, cap, spread)
    return LOG_PROBS[kernel](sde_step(x, v, *some, row, x_next=x_next.detach())[1], some[-1][row])


def numbers(
    kernel: str, x: Tensor, t: Tensor, t_next: Tensor, eta: Tensor, cap: float, spread: Tensor | float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[B] each, in x's dtype or wider: dt = t' - t, pull, rest = 1 - t and std of a step."""
    t, t_next = t.double(), t_next.double()
    pull, std = KERNELS[kernel](t, t_next, eta.double(), cap)
    wide = torch.promote_types(x.dtype, torch.float32)
    return (t_next - t).to(wide), pull.to(wide), (1 - t).to(wide), (std * spread).to(wide)


def dpm2_step(x: Tensor, v: Tensor, t: float, t_next: float, last: tuple[Tensor, float] | None) -> Tensor:
    """DPM-Solver++(2M) (2211.01095, algorithm 2) on the rectified path; first order at t = 1 and at the last step.

        x' = (t'/t) x + (1 - t') (1 - e^-h) D,    D = x0_hat + (x0_hat - last x0_hat) h / (2 h_last)

    with h the step of log((1 - t) / t).

    `last` is (x0_hat, t) of the step before. At first order this is the Euler step of the flow.
    """
    if last is None or t_next == 0 or last[1] >= 1:
        return x + (t_next - t) * v
    now, past, ahead = (math.log((1 - s) / s) for s in (t, last[1], t_next))
    x0 = x - t * v
    estimate = x0 + (x0 - last[0]) * ((ahead - now) / (now - past) / 2)
    return (t_next / t) * x - (1 - t_next) * math.expm1(now - ahead) * estimate


def gaussian_logp(square: Tensor, std: Tensor) -> Tensor:
    """log N(x_next; mean, std^2) in nats per element, of square = mean_D (x_next - mean)^2."""
    return -square / (2 * std.square()) - std.log() - math.log(2 * math.pi) / 2


def cps_logp(square: Tensor, std: Tensor) -> Tensor:
    """-mean_D (x_next - mean)^2: Flow-CPS drops the variance and the constants, so it weighs all steps alike."""
    return -square


LOG_PROBS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flow_sde": gaussian_logp,
    "dance": gaussian_logp,
    "cps": cps_logp,
    "precise": gaussian_logp,
    "edm_churn": gaussian_logp,
}  # log-probs up to what cancels in a ratio; the ODE has none

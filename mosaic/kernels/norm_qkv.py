"""norm_qkv: q, k and v = rms_norm(x) @ weight.T (+ bias), for few rows.

Norm and products as in `rms_norm` and `linear`; arrivals stay as they are. Legend: T rows, D hidden, Q and K columns of
queries and of keys, A counts.
"""

from torch import Tensor

from mosaic.kernels.shared.binding import Run, in_turn, launcher
from mosaic.kernels.shared.norm import bind_norm, normalise_reference
from mosaic.kernels.shared.product import product
from mosaic.kernels.shared.scratch import carve, dtype_name, tiles_of
from mosaic.registrar.tiles import norm_tiles


def bind(
    *, x: Tensor, norm: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor, arrivals: Tensor, q: Tensor,
    k: Tensor, v: Tensor, eps: float, q_bias: Tensor | None = None, k_bias: Tensor | None = None,
    v_bias: Tensor | None = None, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write q [T, Q], k and v [T, K]."""
    h, norms, products = tiles_of("norm_qkv", scratch, {"x": x})
    return in_turn([
        bind_rows(x, norm, h, eps, norms),
        product(h, q_weight, q, products, kernel="norm_qkv", bias_O=q_bias),
        product(h, k_weight, k, products, kernel="norm_qkv", bias_O=k_bias),
        product(h, v_weight, v, products, kernel="norm_qkv", bias_O=v_bias),
    ])  # fmt: skip


launch = launcher(bind)


def bind_rows(x: Tensor, norm: Tensor, h: Tensor, eps: float, scratch: Tensor) -> Run:
    """Bind h = rms_norm(x) [T, D], with scratch for its tiles."""
    rows, width = x.shape
    return bind_norm(x, norm, h, eps, carve(scratch, norm_tiles(rows, 1, width, dtype_name(x.dtype)), "rms_norm"))


def reference(
    *, x: Tensor, norm: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor, arrivals: Tensor, eps: float,
    q_bias: Tensor | None = None, k_bias: Tensor | None = None, v_bias: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return q, k, v and the arrivals, by name, in plain PyTorch."""
    h = normalise_reference(x, norm, eps)
    found = {"q": h @ q_weight.T, "k": h @ k_weight.T, "v": h @ v_weight.T, "arrivals": arrivals}
    for name, bias in (("q", q_bias), ("k", k_bias), ("v", v_bias)):
        if bias is not None:
            found[name] = found[name] + bias
    return found

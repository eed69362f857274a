"""kv[slots] = (k, v) in one layer's columns: keys and values of a window of tokens, kept for later steps.

A row of `kv[R, L*2*W]` holds one token: each layer's keys and values, side by side. Slots are row numbers, each once; a
negative one is that of a padded row, which is not kept. k, v and slots may be sliced by a region of tokens, kv never.
"""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, divides, require


def infer(k: Spec, v: Spec, slots: Spec, kv: Spec, *, layer: int) -> tuple[()]:
    require(len(k.shape) == 2 and k == v, f"k and v must be matrices of one shape and dtype, not {k} and {v}")
    require(slots == Spec(k.shape[:1], "int64"), f"slots must be int64[{k.shape[0]}], not {slots}")
    require(kv.dtype == k.dtype, f"kv must be {k.dtype} as k is, not {kv.dtype}")
    require_layer(kv, layer, k.shape[1])
    return ()


def require_layer(kv: Spec, layer: int, width: Dim) -> None:
    """Refuse rows that are not pairs of keys and values of `width` columns, and a layer that they do not have."""
    require(
        len(kv.shape) == 2 and divides(2 * width, kv.shape[1]), f"kv must be [rows, layers * 2 * {width}], not {kv}"
    )
    layers = kv.shape[1] // (2 * width)
    require(0 <= layer < layers, f"kv has {layers} layers of 2 * {width} columns, not layer {layer}")


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    return specs["slots"].bytes + 2 * (specs["k"].bytes + specs["v"].bytes)


OPERATOR = Operator(
    name="kv_store",
    reads=("k", "v", "slots", "kv"),
    updates=("kv",),
    whole=frozenset({"kv"}),
    infer=infer,
    bytes_moved=bytes_moved,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.kv_store"),
        Implementation(name="triton", backend="cuda", kernel="mosaic.kernels.cuda.kv_store"),
    ),
    roles={"k": "attention", "v": "attention"},
)

"""Keys and values of a window of tokens into one layer of the rows that their sequences own in kv[R, L*2*W].

Rows are handed out in extents: neighbours that one sequence was given at once. A row of `kv` is the memory of one token; in
an extent of n rows the memory of all of them is laid out as [L, 2, K, n, H], so that the keys of one layer and head lie side
by side. Where layers differ in K or H, `layer` counts layers like itself: its keys begin at column `layer` * 2 * K * H.

`extents[X, 4]` lists, sequence after sequence, in order of position: the first row, the rows n, the position whose key comes
first, and how many tokens of the extent lie before that one. Those of sequence b are `cu_extents[b]` to `cu_extents[b + 1]`. A
token in no sequence, or at a position that its sequence has no row for, is not kept. k, v and positions may be sliced by a region
of tokens, the rest never."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, divides, require


def infer(
    k: Spec, v: Spec, kv: Spec, extents: Spec, cu_extents: Spec, cu_seqlens: Spec, positions: Spec,
    *, layer: int, head_size: int,
) -> tuple[()]:  # fmt: skip
    require(len(k.shape) == 2 and k == v, f"k and v must be matrices of one shape and dtype, not {k} and {v}")
    require(kv.dtype == k.dtype, f"kv must be {k.dtype} as k is, not {kv.dtype}")
    require(divides(head_size, k.shape[1]), f"k must have whole heads of {head_size}, it has {k.shape[1]} columns")
    require_layer(kv, layer, k.shape[1])
    require_extents(extents, cu_extents, cu_seqlens)
    require(positions == Spec(k.shape[:1], "int32"), f"positions must be int32[{k.shape[0]}], not {positions}")
    return ()


def require_layer(kv: Spec, layer: int, width: Dim, name: str = "kv") -> None:
    """Refuse rows that are not pairs of keys and values of `width` columns, and a layer that they do not have."""
    require(
        len(kv.shape) == 2 and divides(2 * width, kv.shape[1]), f"{name} must be [rows, layers * 2 * {width}], not {kv}"
    )
    layers = kv.shape[1] // (2 * width)
    require(0 <= layer < layers, f"{name} has {layers} layers of 2 * {width} columns, not layer {layer}")


def require_extents(extents: Spec, cu_extents: Spec, cu_seqlens: Spec) -> None:
    """Refuse what does not say which extents a sequence has."""
    require(
        len(extents.shape) == 2 and extents == Spec((extents.shape[0], 4), "int64"),
        f"extents must be int64[extents, 4], not {extents}",
    )
    require(
        len(cu_seqlens.shape) == 1 and cu_seqlens.dtype == "int32" and cu_extents == cu_seqlens,
        f"cu_seqlens and cu_extents must be int32[sequences + 1], not {cu_seqlens} and {cu_extents}",
    )


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    return specs["positions"].bytes + 2 * (specs["k"].bytes + specs["v"].bytes)


OPERATOR = Operator(
    name="kv_store",
    reads=("k", "v", "kv", "extents", "cu_extents", "cu_seqlens", "positions"),
    updates=("kv",),
    whole=frozenset({"kv", "extents", "cu_extents", "cu_seqlens"}),
    infer=infer,
    bytes_moved=bytes_moved,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.kv_store", row_origin="k"),
        Implementation(
            name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.kv_store", row_origin="k"
        ),
    ),
    roles={"k": "attention", "v": "attention"},
)

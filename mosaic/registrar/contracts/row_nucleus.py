"""A token of each row of logits[C, V] from what top-p and top-k keep, with figures of the kept tokens' softmax.

Tokens are ordered by logit, the highest first, ties to the lower id. `top_p`[1] keeps the tokens before which there is no
more than so much probability of softmax(logits / temperature): those up to the one that passes it (1 and more: all);
`top_k`[1] the first so many (0: all). Of the kept, renormalised: `probability` of the sample, `margin` of the first and
the second, and `entropy`, negative as Dream's: sum p log(p + 1e-10). temperature[1] 0 takes the argmax, with the softmax
at 1. keys[C] as in `row_sample`, whose noise this is.
"""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Dim, Spec, require


def infer(logits: Spec, keys: Spec, temperature: Spec, top_p: Spec, top_k: Spec) -> tuple[Spec, ...]:
    require(len(logits.shape) == 2, f"logits must be [rows, vocabulary], not {logits}")
    rows = logits.shape[0]
    require(keys == Spec((rows,), "int64"), f"keys must be int64[{rows}], one for each row")
    for name, spec, dtype in (
        ("temperature", temperature, "float32"),
        ("top_p", top_p, "float32"),
        ("top_k", top_k, "int32"),
    ):
        require(spec == Spec((1,), dtype), f"{name} must be {dtype}[1]")
    return (Spec((rows,), "int64"), *(Spec((rows,), "float32"),) * 3)


def flops(logits: Spec, keys: Spec, temperature: Spec, top_p: Spec, top_k: Spec) -> Dim:
    """Those of `row_sample`; finding what is kept compares and adds."""
    return 10 * logits.elements


CONTRACT = Contract(
    name="row_nucleus",
    reads=("logits", "keys", "temperature", "top_p", "top_k"),
    writes=("sample", "probability", "margin", "entropy"),
    whole=frozenset({"temperature", "top_p", "top_k"}),
    infer=infer,
    flops=flops,
)

"""Write an operator of your own and compare it with its reference. Needs torch, and no GPU."""

import torch

from mosaic import Implementation, Operator
from mosaic.testing import verify_operator


def launch(*, x, bias, y, scratch=None):  # writes into y, allocates nothing
    torch.add(x, bias, out=y)


ADD_BIAS = Operator(
    name="add_bias",
    reads=("x", "bias"),
    writes=("y",),
    inplace=(("y", "x"),),  # y may overwrite x
    infer=lambda x, bias: (x,),  # y has the shape and dtype of x
    reference=lambda x, bias: x + bias,
    implementations=(Implementation(backend="cpu", kernel=launch),),
)
# every implementation on random operands, whole, in slices and in place
verified = verify_operator(ADD_BIAS, {"x": "float32[tokens, 64]", "bias": "float32[64]"}, sizes={"tokens": 37})
print("verified on", *verified)
# `g.add_op(ADD_BIAS, x, bias)` registers a launch, which `mosaic.compile` runs

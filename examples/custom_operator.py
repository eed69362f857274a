"""Write an operator of your own and compare it with its reference. Needs torch, and no GPU."""

import torch

from mosaic import Implementation, Operator
from mosaic.testing import verify_operator


def launch(*, x, bias, y, scratch=None):  # writes into y, allocates nothing
    torch.add(x, bias, out=y)


ADD_BIAS = Operator(
    name="add_bias",
    operands="x:a[T, F] bias:a[F] -> y:a[T, F]",  # a letter is one size, or one dtype, in all operands
    inplace=(("y", "x"),),  # y may overwrite x
    reference=lambda x, bias: x + bias,
    implementations=(Implementation(backend="cpu", kernel=launch),),
)
# every implementation on random operands, whole, in slices and in place
verified = verify_operator(ADD_BIAS, {"T": 37, "F": 64}, loops=("T",))
print("verified on", *verified)
# `g.add_op(ADD_BIAS, x, bias)` registers a launch, which `mosaic.compile` runs

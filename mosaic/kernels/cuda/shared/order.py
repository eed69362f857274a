"""Float32 numbers as integers of the same order, for exact selection by bisection: shared by transfer and row_nucleus."""

from mosaic.kernels.cuda.shared.launching import tl, triton


@triton.jit
def rank(value):
    """The place of float32 numbers among all of them, int32; 0 has one sign. No number is NaN."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    # negative numbers have larger bits the lower they are: flip all but the sign
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)

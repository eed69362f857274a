"""The rows of a sequence that vote for keys: all, or those of one tile of their block."""

from mosaic.kernels.cuda.shared.launching import tl, triton


@triton.jit
def votes_of(votes, positions, row, inside, tile, SEEN: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Whether rows vote, of blocks of `SEEN` positions in `TILES` tiles of `ROWS`: for this tile, or for any if it is below 0."""
    says = tl.load(votes + row, mask=inside, other=0) != 0
    if TILES > 1:
        says = says & ((tile < 0) | (tl.load(positions + row, mask=inside, other=0) % SEEN // ROWS == tile))
    return says


@triton.jit
def tile_of_voters(
    votes,
    positions,
    first,
    last,
    tile,
    SEEN: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The tile, where any of its rows from `first` to `last` votes; otherwise -1."""
    if TILES > 1:
        voters = tl.zeros([BLOCK], tl.int32)
        for some in range(first, last, BLOCK):
            row = some + tl.arange(0, BLOCK)
            voters += votes_of(votes, positions, row, row < last, tile, SEEN, ROWS, TILES).to(tl.int32)
        tile = tl.where(tl.sum(voters, 0) > 0, tile, -1)
    return tile

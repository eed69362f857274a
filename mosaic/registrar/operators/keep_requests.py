"""What the requests that a step serves keep of their keys, and where it lies (dLLM-Serve, section 4.5).

row and seen are those of `pack_requests`, extents and cu_extents those of `place_requests`; table[S, C] has a row a request. All
windows are `PACKED`, and those that see 0 keys, which stand first, refresh: they attend to themselves alone, and pack keys. With
`whole`, the tokens of these, window i

- has cu_whole[i + 1] = min(cu_seqlens[i + 1], whole);
- has in spans[i], if it refreshes, its block, its packed span and the keys that a head keeps (`select_keys`), and in
  packed_extents[i] its first extent;
- has in own_extents its extents, by the positions of what it stores there: from the packed span on behind the kept keys. If it
  refreshes, they have no rows: all that it keeps is packed.

All else is 0, and bounds do not grow. spans, packed_extents and cu_whole have an empty window more than the step, so that no
attention takes all of a step's tokens for one sequence.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator
from mosaic.registrar.request_table import COLUMNS

OPERATOR = Operator(
    name="keep_requests",
    operands=f"""
        table@:i64[S, {COLUMNS}] row@:i64[B] seen@:i32[B] cu_seqlens@:i32[B+1] extents@:i64[E, 4] cu_extents@:i32[B+1]
        -> spans:i32[B+1, 5] packed_extents:i64[B+1, 4] cu_whole:i32[B+2] own_extents:i64[E, 4]
    """,
    implementations=kernels_of("keep_requests"),
)

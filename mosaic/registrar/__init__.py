"""The symbolic DSL: dims, buffers, ops, aliases, barriers, chunk regions, streams, programs."""

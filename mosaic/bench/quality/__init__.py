"""Quality of a decoding configuration: exact match on generated tasks, by task, length and depth.

`vocabulary`, `split`, `items` and `scoring` need no torch; `run` decodes with a compiled model.
"""

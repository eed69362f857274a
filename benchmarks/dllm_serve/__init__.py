"""dLLM-Serve's experiments: requests that come as a trace says, served by plain PyTorch loops and by Mosaic.

`trace` draws requests, `forward` runs layers, `selection` chooses keys, `padded` has the static loops as published, `phases` steps
of packed requests, `dllm_cache` the one loop that caches features, `baselines` what serves by them, `systems` every system under
its budget, `driving` the points, `tables` and `curves` what documents show of them.
"""

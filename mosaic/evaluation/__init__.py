"""Benchmarks of lm-eval in process: `python -m mosaic.evaluation --model mosaic …`."""

from mosaic.evaluation.likelihood import are_greedy, log_likelihoods

__all__ = ["are_greedy", "log_likelihoods"]

"""Quality of a trained model's answers: exact match on generated tasks, policies side by side, the measurements of MAGE and FOCUS.

`python -m benchmarks.quality exact`, `policies`, `estimation` and `decodability` print them. The questions (`evaluation`) and
their `scoring` need no torch.
"""

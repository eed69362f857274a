"""What policies cost in quality, and why: policies side by side, and the measurements of MAGE and FOCUS along a model's answers.

`python -m benchmarks.quality policies`, `estimation` and `decodability` print them.
"""

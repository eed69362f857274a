"""A fuzzer: random programs, requests and packing instances, held against naive code and validators of their own.

    python -m tests.fuzz --minutes 10                  # everything, on two processes, by a new seed
    python -m tests.fuzz --kind programs --replay 77   # one case again, shrunk

*Programs* (`programs`): a graph made of what the DSL has, registered (`building`), planned by several solvers under several
budgets and configurations, proved by the checker, executed on the CPU under poison (`examining`), and compared with an
interpreter that gives every buffer a tensor of its own (`naive`, `formulas`). *Requests* (`requests`): shipped models on
devices and budgets at random, and scaled-down ones executed. *Packing* (`packing`): instances for every solver of offsets.

A finding is printed with its seed and, for programs, the smallest one that still shows it (`shrinking`); the exit status is 1.
"""

"""Benchmarks of FlowBundler; ``run.py --help`` lists them.

docs/results.md says what they measure, how, and what came out.
"""

"""Testbed library of FlowBundler.

Hosts in network namespaces, Open vSwitch with DPDK between them, traffic,
measurement and its analysis.  docs/testing.md is the guide.
"""

"""FlowBundler in mininet: what utilities/flowbundler_mininet.py offers.

params      what a link's parameters say, and which keys of the switch that is;
            needs neither mininet nor root
vswitch     the Open vSwitch that a Mininet's switches are bridges of
links       FlowBundlerIntf, FlowBundlerLink
switch      FlowBundlerSwitch
controller  FlowBundlerController

Runs under Debian's /usr/bin/python3 with the package mininet and nothing else.
docs/mininet.md is the guide.
"""

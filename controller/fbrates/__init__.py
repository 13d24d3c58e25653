"""Rates of tenants' VMs as OpenFlow 1.3 meters and flows.

Everything the controller knows, except how OpenFlow looks on the wire:

========== =====================================================================
units      rates and sizes, as text and as numbers
loader     YAML with line numbers, duplicate keys refused
config     the file of tenants: what is allowed, and every error at once
ids        which meter id belongs to which VM and destination
plan       configuration + a switch's ports -> the meters and flows it should have
sync       one switch: what it has, what it should have, the messages between
share      how a port's rate is divided among those who share it
sharing    who uses how much of a shared port, and what everybody's meter is to be
service    all switches and all tenants: reload, live rate changes, status
changes    what became of changes that were asked for
rest       HTTP requests -> service calls -> JSON
origin     which HTTP requests are refused because a web page made them
metrics    the same state for Prometheus
launch     the command fb-controller
cli        the command flowbundler-ctl
========== =====================================================================

But for the two commands, nothing here imports Ryu, opens a socket, starts a thread or
reads a clock that it was not given; ``ryu_rates.py`` beside this package does that.
"""

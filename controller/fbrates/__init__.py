"""Rates of tenants' VMs as OpenFlow 1.3 meters and flows.

Everything the controller knows, except how OpenFlow looks on the wire:

=========== ====================================================================
units       rates and sizes, as text and as numbers
loader      YAML with line numbers, duplicate keys refused
config      the file of tenants: what is allowed, and every error at once
ids         which meter id belongs to which VM and destination
plan        configuration + a switch's ports -> the meters and flows it should have
states      the states of a switch, and what leads from one to another
sync        one switch: what it has, what it should have, the messages between
share       how a port's rate is divided among those who share it
sharing     who uses how much of a shared port, and what everybody's meter is to be
state       all that must not be forgotten, as rows of a database
store       where that is kept, and the history of changes
differences what one configuration says differently from another
dbserver    an ovsdb-server of the controller's own
service     all switches and all tenants: reload, live rate changes, status
changes     what became of changes that were asked for
resources   tenants, VMs, destinations and ports, one by one, as parts of a file
routes      every path and method of REST, and what it takes
bodies      what the bodies of requests may be
answers     answers, and refusals as problem details
rest        HTTP requests -> service calls -> JSON
openapi     the description of REST for programs
admission   limits on connections
tokens      who may ask what of REST
origin      which HTTP requests are refused because a web page made them
metrics     the same state for Prometheus
supervised  what systemd is told
launch      the command fb-controller
cli         the command flowbundler-ctl
manual      manual pages, from the commands' parsers
=========== ====================================================================

But for the two commands and dbserver, nothing here imports a framework, opens a socket,
starts a thread or process, or reads a clock that it was not given; what is beside this
package does that.
"""

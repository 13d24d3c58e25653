"""FlowBundler in mininet: links with rates and delays that a userspace switch holds.

    sudo mn --custom utilities/flowbundler_mininet.py --switch fb --link fb,bw=100 --test iperf

or, in a program, where OVSSwitch and TCLink were:

    from flowbundler_mininet import FlowBundlerLink, FlowBundlerSwitch

    net = Mininet(topo=..., switch=FlowBundlerSwitch, link=FlowBundlerLink)

docs/mininet.md is the guide.
"""

import os as _os
import sys as _sys

# "mn --custom" executes this text: there is no __file__ then, and each name without an
# underscore would become one of mn's own.
_HERE = _os.path.dirname(_os.path.abspath(_sys._getframe().f_code.co_filename))
if _HERE not in _sys.path:
    _sys.path.insert(0, _HERE)

from fbmininet import mn as _mn  # noqa: E402
from fbmininet.controller import FlowBundlerController  # noqa: E402
from fbmininet.links import FlowBundlerIntf, FlowBundlerLink  # noqa: E402
from fbmininet.switch import FlowBundlerSwitch  # noqa: E402

__all__ = ["FlowBundlerController", "FlowBundlerIntf", "FlowBundlerLink", "FlowBundlerSwitch"]

switches = {"fb": FlowBundlerSwitch}
links = {"fb": FlowBundlerLink}
controllers = {"fb": FlowBundlerController}

findController = _mn.find_controller
_mn.add_links(links)

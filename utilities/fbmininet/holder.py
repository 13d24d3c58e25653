"""What fb-sandbox runs for a network: waits for the network's end.

Prints its environment, which is how to reach the switch, as JSON.  Then reads names of
interfaces, a line each, until the end of its input, which also comes when mininet has been
killed; it deletes those that are still there.  An empty line has it forget them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

#: "mn -c" kills what has "mininet:" in its command line.  This is to be killed (then
#: fb-sandbox cleans up), fb-sandbox is not, so its command line must not have this.
NAME = "mininet:flowbundler"


def main() -> None:
    """Wait for the end."""
    if sys.argv[1:] != [NAME]:
        os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), NAME])
    print(json.dumps(dict(os.environ)), flush=True)
    links: set[str] = set()
    for line in sys.stdin:
        links = links | {line.strip()} if line.strip() else set()
    for link in links & set(os.listdir("/sys/class/net")):
        subprocess.run(["ip", "link", "del", link], check=False, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

"""An OpenFlow client that knows what its framework knows, and nothing of shape bands.

    plain_client.py ryu|os_ken SOCKET VERSION

asks for the configuration of all meters and prints [[id, type, rate, burst size], ...] as JSON, or
fails as the framework's parser does.
"""

from __future__ import annotations

import importlib
import json
import socket
import struct
import sys

HEADER = struct.Struct("!BBHI")
HELLO, ECHO_REQUEST, MULTIPART_REQUEST, MULTIPART_REPLY = 0, 2, 18, 19
METER_CONFIG, ALL = 10, 0xFFFFFFFF


def receive(connection: socket.socket) -> bytes:
    """Give one message."""
    message = b""
    length = HEADER.size
    while len(message) < length:
        part = connection.recv(length - len(message))
        if not part:
            raise EOFError("the switch has closed the connection")
        message += part
        if len(message) == HEADER.size:
            length = HEADER.unpack(message)[2]
    return message


def main(framework: str, path: str, version: int) -> None:
    """Ask and print."""
    parse = importlib.import_module(f"{framework}.ofproto.ofproto_parser").msg
    protocol = importlib.import_module(f"{framework}.ofproto.ofproto_protocol")
    importlib.import_module(f"{framework}.ofproto.ofproto_v1_{version - 1}_parser")
    datapath = protocol.ProtocolDesc(version=version)
    meters = []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path)
        connection.sendall(HEADER.pack(version, HELLO, HEADER.size, 1))
        body = struct.pack("!HH4xI4x", METER_CONFIG, 0, ALL)
        request = HEADER.pack(version, MULTIPART_REQUEST, HEADER.size + len(body), 2) + body
        connection.sendall(request)
        while True:
            message = receive(connection)
            _, kind, length, xid = HEADER.unpack_from(message)
            if kind != MULTIPART_REPLY:
                assert kind in (HELLO, ECHO_REQUEST), message.hex()
                continue
            reply = parse(datapath, version, kind, length, xid, message)
            meters += [[item.meter_id, band.type, band.rate, band.burst_size]
                       for item in reply.body for band in item.bands]
            if not reply.flags & 1:
                break
    print(json.dumps(sorted(meters)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

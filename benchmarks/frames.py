"""What is sent: frames to many destinations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fbtest.pcap import FlowSpec, tagged_frame


@dataclass(frozen=True)
class Mix:
    """The frames of each destination, in turn; bytes without FCS."""

    name: str
    sizes: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Mean bytes of a frame."""
        return sum(self.sizes) / len(self.sizes)

    @property
    def options(self) -> dict[str, int]:
        """What a port needs to be told."""
        largest = max(self.sizes)
        return {"mtu_request": largest - 14} if largest > 1514 else {}


LARGE = Mix("1514 B", (1514,))
JUMBO = Mix("9014 B", (9014,))
SMALL = Mix("64 B", (64,))
# 7:4:1, as evenly as 12 frames allow.
IMIX = Mix("IMIX", (64, 570, 64, 64, 570, 64, 1514, 64, 570, 64, 570, 64))


def address(n: int) -> str:
    """The IPv4 address of destination `n`, counted from 0."""
    return f"10.{73 + (n >> 16)}.{n >> 8 & 255}.{n & 255}"


def frames(destinations: range, mix: Mix, run: int = 1) -> Iterator[bytes]:
    """`run` frames to each destination in turn, as often as all sizes have come."""
    templates = {size: tagged_frame(FlowSpec(0, frame_size=size)) for size in set(mix.sizes)}
    for turn in range(len(mix.sizes)):
        for n in destinations:
            for k in range(turn * run, (turn + 1) * run):
                frame = templates[mix.sizes[(k + n) % len(mix.sizes)]]
                frame[30:34] = bytes(map(int, address(n).split(".")))
                frame[24:26] = b"\0\0"
                words = sum(int.from_bytes(frame[at:at + 2], "big") for at in range(14, 34, 2))
                words = (words & 0xFFFF) + (words >> 16)
                frame[24:26] = (~(words + (words >> 16)) & 0xFFFF).to_bytes(2, "big")
                yield bytes(frame)

"""The network between made-up machines: what one sends reaches another, or is late, or is lost.

    python wire.py NAMESPACE ... --delay SECONDS --loss SHARE

Each namespace gets a device eth0 whose packets come to this process, which hands them on by their
address: 10.77.0.1 is the first namespace, and so on. Lines on standard input change the network:
`cut 2` pulls the second machine's cable, `join 2` puts it back.
"""

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def device(namespace: str) -> int:
    """A new eth0 in the namespace; its descriptor reads and writes IP packets."""
    with open("/proc/self/ns/net") as here:
        _enter(f"/run/netns/{namespace}")
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
        # back, or this process would be one of the machine's, and end with it
        _enter(f"/proc/self/fd/{here.fileno()}")
    return end


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as there:
        # Python has os.setns from 3.12 on
        if libc.setns(there.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"can't enter the network namespace {namespace}")


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("namespaces", nargs="+")
    cli.add_argument("--delay", type=float, default=0.0)
    cli.add_argument("--loss", type=float, default=0.0)
    options = cli.parse_args()
    ends = [device(name) for name in options.namespaces]
    print("ready", flush=True)
    cut: set[int] = set()
    draw = random.Random(0)
    late: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        ready, _, _ = select.select([*ends, sys.stdin], [], [], wait)
        if sys.stdin in ready:
            words = sys.stdin.readline().split()
            if not words:
                return  # whoever made the network is gone
            (cut.add if words[0] == "cut" else cut.discard)(int(words[1]) - 1)
        for source, end in enumerate(ends):
            if end not in ready:
                continue
            packet = os.read(end, 1 << 16)
            target = packet[19] - 1  # the last byte of an IPv4 packet's destination
            known = packet[0] >> 4 == 4 and 0 <= target < len(ends)
            if known and not {source, target} & cut and draw.random() >= options.loss:
                count += 1
                heapq.heappush(late, (time.monotonic() + options.delay, count, target, packet))
        while late and late[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(late)
            if target not in cut:
                # where its queue is full the packet is dropped, as a switch does
                with contextlib.suppress(BlockingIOError):
                    os.write(ends[target], packet)


if __name__ == "__main__":
    main()

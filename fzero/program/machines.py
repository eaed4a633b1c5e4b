"""Hardware by name: the data sheet's figures, and the share of them that is reached.

- FLOP/s, bandwidth and size of memory: NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM
  and HGX B200; dense, without sparsity.
- Share of FLOP/s in large products: 0.85 on A100, 0.7 from H100 on, whose clocks fall under load:
  about what cuBLAS reaches.
- Share in fused attention: 0.6 on A100, 0.4 from H100 on with the kernels that were made for A100.
  Dao, FlashAttention-2, arXiv:2307.08691; Shah et al., FlashAttention-3, arXiv:2407.08608.
- Share of memory bandwidth: 0.85, about what long copies reach.
- Share of NVLink and network: 0.8, about the bus bandwidth of nccl-tests with large messages.
- Network: a card of 200 Gb/s for each A100, of 400 Gb/s for others, as in DGX and HGX nodes of
  eight.
- Latencies: 3 us a hop inside a node, 8 us between: assumed, between the figures that NCCL tunes
  itself by for its protocols LL128 and Simple (src/graph/tuning.cc). Overhead: 4 us an operator,
  assumed.
- The CPU box is assumed: 16 cores a rank, four ranks a box, 25 Gb/s Ethernet between boxes.
"""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from fzero.errors import ConfigError
from fzero.program.hardware import Hardware


def _gpu(
    name: str,
    *,
    gigabytes: float,
    low: float,
    single: float,
    bandwidth: float,
    link: float,
    network: float,
    units: int,
    products: float = 0.7,
    attention: float = 0.4,
) -> Hardware:
    """A GPU in nodes of eight.

    Args:
        gigabytes: of memory, 10^9 bytes each.
        low, single: FLOP/s in bfloat16 and float32, as sold.
        bandwidth: bytes/s of its memory.
        link: bytes/s of NVLink, one way.
        network: bits/s of the device's network card.
        units: streaming multiprocessors.
        products, attention: shares of `low` that are reached.
    """
    return Hardware(
        name,
        flops=0.8 * single,
        low_flops=products * low,
        attention_flops=attention * low,
        peak_flops=low,
        memory_bandwidth=0.85 * bandwidth,
        memory=int(gigabytes * 1e9),
        overhead=4e-6,
        link_latency=3e-6,
        link_bandwidth=0.8 * link,
        devices_per_node=8,
        node_latency=8e-6,
        node_bandwidth=0.8 * network / 8,
        tile=(128, 256),
        units=units,
    )


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "a100": _gpu(
            "A100 80GB", gigabytes=80, low=312e12, single=19.5e12, bandwidth=2.039e12,
            link=300e9, network=200e9, units=108, products=0.85, attention=0.6,
        ),
        "h100": _gpu(
            "H100 80GB", gigabytes=80, low=989e12, single=67e12, bandwidth=3.35e12,
            link=450e9, network=400e9, units=132,
        ),
        "h200": _gpu(
            "H200 141GB", gigabytes=141, low=989e12, single=67e12, bandwidth=4.8e12,
            link=450e9, network=400e9, units=132,
        ),
        "b200": _gpu(
            "B200 180GB", gigabytes=180, low=2250e12, single=75e12, bandwidth=8e12,
            link=900e9, network=400e9, units=148,
        ),
        "cpu": Hardware(
            "16 cores of a CPU box",
            flops=1e12,
            low_flops=1e12,
            memory_bandwidth=8e10,
            memory=64 * 10**9,
            overhead=4e-6,
            link_latency=1e-4,
            link_bandwidth=5e9,
            devices_per_node=4,
            node_latency=2e-4,
            node_bandwidth=0.8 * 25e9 / 8 / 4,
            shares_memory=True,
        ),
    }
)  # fmt: skip
"""By the name that `simulate(hardware=...)` and `--hardware` take."""


def resolve_hardware(hardware: Hardware | str | None) -> Hardware:
    """The hardware of this name; None: H100.

    Raises:
        ConfigError: there is none of this name.

    >>> resolve_hardware("h100").devices_per_node
    8
    >>> resolve_hardware("h1000")
    Traceback (most recent call last):
    ...
    fzero.errors.ConfigError: hardware='h1000' is not known. Did you mean 'h100'? ...
    """
    if isinstance(hardware, Hardware):
        return hardware
    name = "h100" if hardware is None else hardware
    if isinstance(name, str) and (found := HARDWARE.get(name.lower().removesuffix("-80"))):
        return found
    near = difflib.get_close_matches(str(name), HARDWARE, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"hardware={hardware!r} is not known.{hint} It must be one of {', '.join(HARDWARE)}, or a "
        "fzero.Hardware(...) of your own."
    )

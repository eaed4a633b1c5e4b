"""What torch itself is set to, where a recording depends on it."""

from typing import Any, NamedTuple

import torch

from fzero.program.trace import is_anomaly_mode


class Ambient(NamedTuple):
    """Torch's settings that a function meets while it is recorded; they stand in no code of its.

    Attributes:
        default_dtype, default_device: of tensors that are made without.
        cpu_autocast_dtype, cuda_autocast_dtype: what autocast takes inside of a model function that
            names no dtype.
        deterministic_algorithms: with which some operators are others.
        anomaly_mode: of which a Program knows nothing: it is refused.
        mkldnn, cudnn: whether an RNN, say, is one operator of theirs.
        flash_attention, memory_efficient_attention, math_attention, cudnn_attention,
        attention_priority: which operator `scaled_dot_product_attention` is, as set by
            `torch.nn.attention.sdpa_kernel`.
        reduced_attention: whether attention of 16 bits that is written out computes in them.
        einsum_path: in which order `torch.einsum` contracts.
    """

    default_dtype: torch.dtype
    default_device: torch.device
    cpu_autocast_dtype: torch.dtype
    cuda_autocast_dtype: torch.dtype
    deterministic_algorithms: bool
    anomaly_mode: bool
    mkldnn: bool
    cudnn: bool
    flash_attention: bool
    memory_efficient_attention: bool
    math_attention: bool
    cudnn_attention: bool
    attention_priority: tuple[int, ...]
    reduced_attention: bool
    einsum_path: str | None

    @classmethod
    def of_now(cls) -> "Ambient":
        """What this thread meets.

        Examples:
            >>> from torch.nn.attention import SDPBackend, sdpa_kernel
            >>> before = Ambient.of_now()
            >>> with sdpa_kernel(SDPBackend.MATH):
            ...     print(before.changes(Ambient.of_now())[0])
            torch's flash_attention from True to False
        """
        cuda, einsum = torch.backends.cuda, torch.backends.opt_einsum
        return cls(
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_autocast_dtype("cpu"),
            torch.get_autocast_dtype("cuda"),
            torch.are_deterministic_algorithms_enabled(),
            is_anomaly_mode(),
            torch.backends.mkldnn.enabled,  # pyright: ignore[reportArgumentType]
            torch.backends.cudnn.enabled,  # pyright: ignore[reportArgumentType]
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            tuple(torch._C._get_sdp_priority_order()),  # without a public name
            cuda.fp16_bf16_reduction_math_sdp_allowed(),
            einsum.strategy if einsum.enabled else None,
        )

    def changes(self, now: "Ambient") -> list[str]:
        """What is otherwise now, by name.

        Examples:
            >>> one = Ambient.of_now()
            >>> one.changes(one._replace(anomaly_mode=True))
            ["torch's anomaly_mode from False to True"]
        """
        return changes(self._asdict(), now._asdict())

    def as_data(self) -> dict[str, str]:
        """To be compared in another process, by `changes`."""
        return {name: repr(value) for name, value in self._asdict().items()}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The rows in which two of `Ambient`'s dicts differ, in words."""
    names = dict.fromkeys((*before, *now))
    rows = [(name, before.get(name, "nothing"), now.get(name, "nothing")) for name in names]
    return [f"torch's {name} from {a} to {b}" for name, a, b in rows if a != b]

"""The device that is trained on, under DeepSpeed's names."""

from typing import Any

import torch

from fzero.compat.deepspeed.comm import device_type, get_local_rank


class Accelerator:
    """What scripts ask a device; the rest is `torch.cuda`'s or `torch.cpu`'s, under its name."""

    def __init__(self) -> None:
        self._name = device_type()

    def device_name(self, device_index: int | None = None) -> str:
        """Such as "cuda:1".

        >>> torch.device(get_accelerator().device_name()).type in ("cpu", "cuda")
        True
        """
        alone = device_index is None or self._name == "cpu"
        return self._name if alone else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """Of this rank."""
        return self.device_name(get_local_rank())

    def current_device(self) -> Any:
        """Its number, or "cpu"."""
        return "cpu" if self._name == "cpu" else torch.cuda.current_device()

    def device(self, device_index: int | None = None) -> torch.device:
        """As torch knows it."""
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        """Let this rank use it."""
        if self._name != "cpu":
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """How many there are on this machine."""
        return 1 if self._name == "cpu" else torch.cuda.device_count()

    def is_available(self) -> bool:
        """Whether it is there."""
        return self._name == "cpu" or torch.cuda.is_available()

    def communication_backend_name(self) -> str:
        """What moves its data between ranks."""
        return "gloo" if self._name == "cpu" else "nccl"

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bfloat16."""
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether it computes in float16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """What a model can compute in."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for it."""
        if self._name != "cpu":
            torch.cuda.synchronize(device_index)

    def manual_seed(self, seed: int) -> None:
        """Seed its generator."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu if self._name == "cpu" else torch.cuda, name)


def get_accelerator() -> Accelerator:
    """The device that is trained on."""
    return Accelerator()

"""SIGTERM as a question that all ranks answer alike, at the end of a step."""

import signal
from types import FrameType

import torch
import torch.distributed as dist


class StopOnSignal:
    """Whether a signal has asked the program to stop, the same on every rank.

    A scheduler that takes a machine back sends SIGTERM some seconds before. It reaches the ranks
    at different moments of different steps, so they must agree on the step that is the last.

    Args:
        number: of the signal. From now on it does nothing but set a flag.

    Examples:
        >>> import os
        >>> stop = StopOnSignal()
        >>> stop()
        False
        >>> os.kill(os.getpid(), signal.SIGTERM)
        >>> stop()
        True
        >>> stop.restore()
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self._number, self._asked = number, False
        self._before = signal.signal(number, self._note)

    def __call__(self) -> bool:
        """True once any rank got the signal; every rank must call it, once a step."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._asked
        device = "cpu" if "gloo" in str(dist.get_backend_config()) else None
        flag = torch.tensor(
            int(self._asked), device=device or torch.accelerator.current_accelerator()
        )
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def restore(self) -> None:
        """Let the signal do what it did before."""
        signal.signal(self._number, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

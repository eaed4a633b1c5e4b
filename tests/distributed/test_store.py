"""A store that is silent ends no rank's patience but its own question's."""

import threading

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fzero.distributed.store import Asked, StoreSilent


def test_answers_and_errors_are_those_of_the_store() -> None:
    asked = Asked(dist.HashStore())
    asked(lambda store: store.set("a", "1"))
    assert asked(lambda store: store.get("a")) == b"1"
    with pytest.raises(ZeroDivisionError):
        asked(lambda store: 1 // 0)


def test_silence_ends_after_its_time_and_holds_up_nobody_for_longer() -> None:
    asked, heard = Asked(dist.HashStore()), threading.Event()

    def never(store: Store) -> None:
        heard.wait()

    for _ in range(3):  # the second one is not even asked: it would stand behind the first
        with pytest.raises(StoreSilent, match="not answered"):
            asked(never, 0.05)
    threads = [x for x in threading.enumerate() if x.name == "fzero-store"]
    heard.set()
    assert asked(lambda store: store.add("n", 1), 5.0) == 1
    assert len(threads) == 1

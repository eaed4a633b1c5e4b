"""What is kept alive outlives everybody who knew it."""

import weakref

from fzero.distributed.keepalive import keep_alive


class Group:
    """Stands for a process group: something that can be destroyed."""


def test_what_is_kept_alive_is_never_destroyed() -> None:
    kept, other = Group(), Group()
    references = [weakref.ref(kept), weakref.ref(other)]
    keep_alive(kept)
    del kept, other
    assert [reference() is None for reference in references] == [False, True]

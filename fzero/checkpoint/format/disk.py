"""Everything that a save does to the disk, one small function each.

A save is whole or absent because of the order of these calls and nothing else, so tests replace
them one at a time to stop a process, or to fill the disk, at every one of them.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from fzero.errors import CheckpointError
from fzero.numerics.host import is_on_host


def as_path(path: str | os.PathLike[str]) -> Path:
    """A user's path; what is none is refused.

    Raises:
        CheckpointError: it is no path, or one that no file system has.
    """
    if isinstance(path, str) or hasattr(path, "__fspath__"):
        if "\0" in str(found := Path(path)):
            raise CheckpointError(f"path is {str(found)!r}, and no path has a NUL byte in it.")
        return found
    raise CheckpointError(
        f"path is a {type(path).__name__}, and must be a str or a pathlib.Path: the folder of the "
        "run's checkpoints comes first, as in save(path, params, opt_state)."
    )


def make_folder(path: Path) -> None:
    """Make a folder, and the ones above it."""
    path.mkdir(parents=True, exist_ok=True)


def create(path: Path) -> int:
    """A descriptor of a new file; one that is there already, or a link, is an error."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


@contextlib.contextmanager
def created(path: Path) -> Iterator[int]:
    """`create`, closed at the end. What the disk refuses inside names the path."""
    file = create(path)
    try:
        yield file
    except OSError as error:
        error.filename = error.filename or str(path)  # a descriptor's errors know of no name
        raise
    finally:
        os.close(file)


def append(file: int, data: memoryview) -> None:
    """Write all of `data` at the end of the file."""
    # the system may take a part of it only
    while data:
        data = data[os.write(file, data) :]


def sync(file: int) -> None:
    """Return once the file's bytes are on the disk."""
    os.fsync(file)


def sync_folder(path: Path) -> None:
    """Return once the folder's entries are on the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def rename(old: Path, new: Path) -> None:
    """Give a folder another name, at once or not at all; fails if the new one has files in it."""
    os.rename(old, new)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders at once; False, and nothing done, where the system can't.

    Linux can since 3.15 (`renameat2`), on most file systems but NFS.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = os.fsencode(one), os.fsencode(other)
    here, swap = ctypes.c_int(-100), ctypes.c_uint(2)  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, names[0], here, names[1], swap) == 0


def link(old: Path, new: Path) -> None:
    """A second name for a file; where the file system has none, the new name in place of the old.

    Then readers who look for the old one are told that a file is missing.
    """
    try:
        os.link(old, new)
    except OSError:
        os.rename(old, new)


def unlink(file: Path) -> None:
    """Remove a file, if it is there."""
    file.unlink(missing_ok=True)


class Lock:
    """Hold of one folder, for one process at a time.

    It is there before it takes anything, so that whoever made it can let go in a `finally`,
    wherever an interrupt came. It lets go too when it is collected, and when the process ends: a
    child that was forked meanwhile has it no longer, and does not keep it.
    """

    _file: int | None = None  # of the class, too: it may be collected before it is made

    def __init__(self) -> None:
        self._process = os.getpid()
        _LOCKS.add(self)  # before it opens anything

    def take(self, folder: Path) -> bool:
        """Take hold of a folder; False if somebody else has it.

        Where the file system has no locks nothing is held, and nobody can be asked.
        """
        self._file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # not kept open: the folder may have been removed and made anew when it is asked again
            self.let_go()
            return False
        except OSError:
            self.let_go()
        return True

    def let_go(self) -> None:
        """Let the folder go, if it is held."""
        if self._file is None:
            return
        try:
            # Closing alone would leave it to a process that was forked; and that one must not undo
            # what this one holds.
            if os.getpid() == self._process:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        except OSError:
            pass  # what it was held for is done, and closed it is gone
        finally:
            opened, self._file = self._file, None
            with contextlib.suppress(OSError):
                os.close(opened)

    __del__ = let_go

    def forget(self) -> None:
        """In a process that was forked: close what is the parent's, who still holds it."""
        opened, self._file = self._file, None
        if opened is not None:
            with contextlib.suppress(OSError):
                os.close(opened)


_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()
"""Of this process, as its open files are."""


def _forget_all() -> None:
    for lock in list(_LOCKS):
        lock.forget()


# A loader's worker may live on where its trainer was killed in the midst of a save.
os.register_at_fork(after_in_child=_forget_all)


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, or a file, if it is there.

    Of a link the link goes, and what it points to stays.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor from `on_host`, for as long as the tensor lives."""
    assert is_on_host(tensor)
    if tensor.nbytes == 0:
        return memoryview(b"")
    # Not `tensor.numpy()`: numpy has no bfloat16.
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")

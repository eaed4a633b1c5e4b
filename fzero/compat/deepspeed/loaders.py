"""Loaders of a rank's micro-batches."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from fzero.errors import ConfigError


class RepeatingLoader:
    """A loader that begins again when it is over.

    >>> loader = RepeatingLoader([1, 2])
    >>> [next(loader) for _ in range(5)]
    [1, 2, 1, 2, 1]
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def loader_of(
    dataset: Any,
    batch_size: int | None,
    *,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Any = None,
    shuffle: bool = True,
    drop_last: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """A rank's share of a data set, in micro-batches, in the order of `DistributedSampler`.

    Raises:
        ConfigError: the configuration says no batch size.
    """
    if batch_size is None:
        raise ConfigError(
            "training_data was given, and the configuration says neither train_batch_size nor "
            "train_micro_batch_size_per_gpu. Add one of them."
        )
    if (
        sampler is None
        and isinstance(dataset, Dataset)
        and not isinstance(dataset, IterableDataset)
    ):
        sampler = DistributedSampler(dataset, world_size, rank, shuffle=shuffle)
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=pin_memory,
    )

"""Samples that ranks see twice, where a loader is not ``TextDataModule``'s."""

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def warn_of_repeated_samples(loaders: object, stage: str) -> None:
    """Say how many samples are repeated, so that all ranks get equally many.

    Args:
        loaders: loader of a stage, or any collection of them.
        stage: "training", "validation" or "test", for the message.
    """
    apply_to_collection(loaders, DataLoader, _warn, stage)


def _warn(loader: DataLoader[object], stage: str) -> None:
    sampler = loader.sampler
    if not isinstance(sampler, DistributedSampler):
        return
    if (repeated := sampler.total_size - len(loader.dataset)) > 0:  # type: ignore[arg-type]  # which has a length here
        rank_zero_warn(
            f"{repeated} of the {len(loader.dataset):,} {stage} samples "  # type: ignore[arg-type]
            f"{'counts' if repeated == 1 else 'count'} twice: Lightning's sampler gives each of {sampler.num_replicas} "
            f"ranks equally many; give a number of samples that {sampler.num_replicas} divides, or use "
            "lit_ft.TextDataModule, which repeats none"
        )

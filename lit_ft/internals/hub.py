"""The Hugging Face hub's libraries without a network: they have an environment variable for it, but no function."""

from datasets import config
from huggingface_hub import constants, get_session
from lightning.pytorch.utilities.rank_zero import rank_zero_info

PROBE_SECONDS = 10
"""Seconds within which the hub must answer."""


def use_the_cache_without_a_network() -> None:
    """From now on read data sets from the hub's cache alone, if the hub cannot be reached; a message says so.

    By default each file is asked for again and again, for minutes.
    """
    if constants.is_offline_mode():
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception as error:  # of the HTTP library, from DNS to a proxy: none of them is an answer
        rank_zero_info(
            f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}): data sets are read from the cache alone"
        )
        constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True

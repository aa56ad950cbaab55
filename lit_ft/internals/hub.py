"""The Hugging Face hub's libraries without a network, and what helps where a name is not found.

The libraries have an environment variable for the first, but no function.
"""

import re
from functools import cache
from pathlib import Path

from datasets import config
from huggingface_hub import constants, get_session
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from lightning.pytorch.utilities.rank_zero import rank_zero_info

PROBE_SECONDS = 10
"""Seconds within which the hub must answer."""


def use_the_cache_without_a_network() -> None:
    """From now on read models and data sets from the hub's cache alone, if the hub cannot be reached; a line says so.

    By default each file is asked for again and again, for minutes.
    """
    if constants.is_offline_mode():
        return
    if (reason := _obstacle(constants.ENDPOINT)) is not None:
        rank_zero_info(
            f"{constants.ENDPOINT} cannot be reached ({reason}): models and data sets are read from the cache alone; "
            "HF_ENDPOINT names a mirror"
        )
        constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True


@cache
def _obstacle(endpoint: str) -> str | None:
    """Why a hub does not answer; None if it does. It is asked once."""
    try:
        get_session().head(endpoint, timeout=PROBE_SECONDS)
    except Exception as error:  # of the HTTP library, from DNS to a proxy: none of them is an answer
        return type(error).__name__
    return None


def download_first(name: str) -> str:
    """End of an error's advice for an adapter that is no folder, and may be one of the hub; nothing for other names."""
    if Path(name).exists() or re.fullmatch(r"[\w.-]+/[\w.-]+", name) is None:
        return ""
    return f"; one of the hub is downloaded first: hf download {name} --local-dir {name.split('/')[1]}"


def remedy(repository: str, error: Exception) -> str | None:
    """What helps where the hub answers, but without the repository; None for other errors.

    Args:
        repository: its id, ``OWNER/NAME``, with ``datasets/`` before that of a data set.
        error: error of the hub's library, or one that it caused.
    """
    address = f"{constants.ENDPOINT}/{repository}"
    causes = error, error.__cause__
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return (
            f"its owner gives access to those who ask: accept the terms at {address}, and log in with `hf auth login`"
        )
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return f"there is no {address}, or it is private: correct the name, or log in with `hf auth login`"
    return None

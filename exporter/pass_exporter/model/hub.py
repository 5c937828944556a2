"""Asks the Hugging Face hub for a model by one short request: without a connection its client would
retry six times, for half a minute each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pass_exporter.model.files import check_files
from pass_exporter.model.registry import adapter_message
from pass_runtime.errors import PassError

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
TIMEOUT_SECONDS = 5.0


def hub_arguments(repo: str, revision: str | None) -> dict[str, Any]:
    """Return the arguments for `from_pretrained`, which without a connection reads the cache.
    Raises PassError if neither has the model, or if it is no whole model."""
    arguments = {} if revision is None else {"revision": revision}
    try:
        siblings = (
            HfApi().model_info(repo, revision=revision, timeout=TIMEOUT_SECONDS).siblings or []
        )
    except HFValidationError:
        raise PassError(
            f"there is no directory {repo}, and {repo!r} is no id of the Hugging Face hub"
        ) from None
    except RevisionNotFoundError:
        raise PassError(f"{repo} has no --revision {revision} on the Hugging Face hub") from None
    except RepositoryNotFoundError:
        raise PassError(
            f"there is no directory {repo}, and no such model on the Hugging Face hub: check the "
            "name, or log in (hf auth login) if it is private or gated"
        ) from None
    except HfHubHTTPError:
        # Another answer of the hub: `from_pretrained` gets it too, and explains it better.
        return arguments
    except Exception as error:
        # No connection. The class depends on the HTTP library of the hub client's version.
        if isinstance(try_to_load_from_cache(repo, CONFIG, revision=revision), str):
            return arguments | {"local_files_only": True}
        if isinstance(error, OfflineModeIsEnabled):
            reason = "HF_HUB_OFFLINE is set"
        else:
            reason = " ".join(str(error).split()) or type(error).__name__
        raise PassError(
            f"there is no directory {repo}, and the Hugging Face hub cannot be reached ({reason}): "
            "check the name and the network, or give a local directory or .gguf file"
        ) from None
    files = {sibling.rfilename for sibling in siblings}
    if ADAPTER_CONFIG in files:
        raise PassError(adapter_message(repo, None))
    if files and CONFIG not in files:
        raise PassError(
            f"{repo} has no {CONFIG} on the Hugging Face hub, so it is no model that "
            "transformers can load"
        )
    return arguments


def check_cached_files(repo: str, revision: str | None) -> None:
    """Raise PassError for the first damaged file of a hub model in the client's cache."""
    config = try_to_load_from_cache(repo, CONFIG, revision=revision)
    if not isinstance(config, str):
        return
    try:
        check_files(Path(config).parent, is_complete=False)
    except PassError as error:
        raise PassError(f"{error} (hf download {repo} --force-download)") from None

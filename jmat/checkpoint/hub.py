"""Downloads from the Hugging Face hub, and says in one sentence why where it cannot."""

import pathlib
from typing import Any

import huggingface_hub
import huggingface_hub.errors

from jmat.runtime.errors import first_line


def snapshot(missing: str, repo: str, **options: Any) -> pathlib.Path:
    """Returns the local folder with the files of a repository, downloaded unless they
    are in the hub's cache.

    Args:
      missing: begins the error, such as `no model 'x': not a local folder`.
      repo: its id.
      options: of `huggingface_hub.snapshot_download`.

    Raises:
      FileNotFoundError: the hub cannot be reached, or has no such repository.
    """
    errors = huggingface_hub.errors
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(repo, **options))
    except errors.LocalEntryNotFoundError:
        raise FileNotFoundError(
            f"{missing}, not in the hub's cache, and the hub cannot be reached (offline mode, or "
            "no network)."
        ) from None
    except (errors.HfHubHTTPError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise FileNotFoundError(f"{missing}, and the hub says: {first_line(error)[:300]}") from None

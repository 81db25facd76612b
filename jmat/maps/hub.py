"""Maps on the Hugging Face hub: downloads them, and uploads them for others."""

import pathlib

import huggingface_hub
import huggingface_hub.errors

from jmat.checkpoint.hub import snapshot
from jmat.maps.files import MAPS_FILES
from jmat.maps.lens_files import CONFIG, PARAMS, check_replaceable
from jmat.runtime.errors import first_line, shortened

# Files of a folder with maps; all others of a repository stay where they are.
_FILES = (*MAPS_FILES, CONFIG, PARAMS, "*.pt", "*.pickle", "*.pkl")
_TYPES = {"spaces": "space", "datasets": "dataset", "models": "model"}


def fetch_maps(name: str, revision: str | None) -> pathlib.Path:
    """Returns the local folder or file of maps on the hub, such as `owner/repository`,
    `owner/repository/folder`, `owner/repository/file.pt` or
    `spaces/owner/repository/folder`.

    Raises:
      FileNotFoundError: the hub cannot be reached, or has no such maps.
    """
    parts = name.split("/")
    kind = _TYPES.get(parts[0]) if len(parts) > 2 else None
    parts = parts if kind is None else parts[1:]
    repo, inside = "/".join(parts[:2]), "/".join(parts[2:])
    at = "" if revision is None else f" at revision {revision!r}"
    missing = f"no maps {shortened(name)}{at}: not a file or folder here"
    under = f"{inside}/" if inside else ""
    folder = snapshot(
        missing,
        repo,
        revision=revision,
        allow_patterns=[*([inside] if inside else []), *(f"{under}{file}" for file in _FILES)],
        ignore_patterns=[f"{under}*/*"],  # of folders inside
        **({} if kind is None else {"repo_type": kind}),
    )
    if not (folder / inside).exists():
        # Where the hub cannot be reached, the folder is what its cache has of the repository.
        raise FileNotFoundError(
            f"{missing}, and no {inside} of {repo} is in the hub's cache: check the name, and that "
            "the hub can be reached (no offline mode)."
        )
    return folder / inside


def is_hub_name(name: str) -> bool:
    """Returns whether a name can be one on the hub."""
    parts = name.split("/")
    return not name.startswith(("~", ".")) and all(part.strip("./ ") for part in parts)


def upload_folder(folder: pathlib.Path, repo: str, *, private: bool, revision: str | None) -> str:
    """Uploads the files of a folder into a repository, which is made where there is
    none; returns the address of the commit.

    Raises:
      ValueError: the repository has a config.json that is not a lens's, and the folder
        would replace it.
      ConnectionError: the hub cannot be reached, or refuses.
    """
    errors = huggingface_hub.errors
    try:
        hub = huggingface_hub.HfApi()
        if (folder / CONFIG).exists():
            _check_config(repo, revision)
        hub.create_repo(repo, private=private, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision,
            commit_message="Maps, written by jmat",
        )
        return str(commit.commit_url)
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise ConnectionError(
            f"cannot push maps to {shortened(repo)} ({first_line(error)[:300]}): it takes the "
            "network, HF_HUB_OFFLINE unset, and a token with the right to write "
            "(`hf auth login`)."
        ) from None


def _check_config(repo: str, revision: str | None) -> None:
    """Raises ValueError where a repository has a config.json that is not a lens's."""
    errors = huggingface_hub.errors
    try:
        path = huggingface_hub.hf_hub_download(repo, CONFIG, revision=revision)
    except (
        errors.RemoteEntryNotFoundError,
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
    ):
        return
    check_replaceable(pathlib.Path(path), f"{CONFIG} of {repo} on the hub", "repository")

"""Turns a model's name into a folder. Owns all traffic with the hub, knows no file's meaning."""

import errno
import os
import re
from pathlib import Path

from lfm2.errors import ModelNotFound

DEMO_FOLDER = Path(__file__).parent / "demo"
HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(\S+))?", re.ASCII)
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
# A published folder holds its checkpoint at the top; below lie copies for other engines.
UNWANTED = ["*/*"]


def resolve(
    name: str | os.PathLike | None,
    *,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """Find or download the model called `name` and return the folder with its files.

    None is the built-in model. An existing folder is taken as is, even when it looks like a hub
    name. Anything of the form `org/name[@revision]` is downloaded from `endpoint` into `cache_dir`
    (None: the hub library's own defaults) unless it is there already. Raises ModelNotFound.
    """
    if name is None:
        return DEMO_FOLDER
    name = os.fspath(name)
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        raise ModelNotFound(
            f"{name} is a file: give the folder that holds config.json and *.safetensors"
        )
    hub_name = HUB_NAME.fullmatch(name)
    if hub_name:
        return download(hub_name[1], hub_name[2], endpoint, cache_dir)
    if "/" in name or name.startswith((".", "~")):
        raise ModelNotFound(f"no such folder: {name} (a hub name has the form org/name[@revision])")
    is_ours = name.lower().startswith("lfm2")
    hint = f"did you mean LiquidAI/{name}?" if is_ours else "a hub name has the form org/name"
    raise ModelNotFound(f"no folder named {name!r} here: {hint}")


def download(repo: str, revision: str | None, endpoint: str | None, cache_dir: Path | None) -> Path:
    """Bring the checkpoint `repo` into the local cache and return its folder there.

    A complete cached copy costs one request, which asks where the branch is now, and none when
    `revision` is a full commit hash; it is also used when the hub cannot be reached. Raises
    ModelNotFound.
    """
    # Imported here: it takes 0.3 s, which the built-in model and local folders need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub import utils as hub

    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            endpoint=endpoint,
            cache_dir=cache_dir,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
        )
    except hub.HFValidationError as error:
        raise ModelNotFound(f"{repo} is not a valid hub name: {error}") from error
    except hub.GatedRepoError as error:
        raise ModelNotFound(
            f"{repo} is gated: accept its terms on its hub page, log in with `hf auth login`"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub has no model {repo}, or it is private: check the spelling or log in"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise ModelNotFound(
            f"{repo} has no revision {revision!r}: give a branch, a tag or a full commit hash"
        ) from error
    except hub.LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"{_why_unreachable(error.__cause__)}, and the local cache holds no complete {repo}"
        ) from error
    # Requests, httpx and xet fail with classes that share no base, and the library has used each.
    except Exception as error:
        raise ModelNotFound(_why_failed(repo, error)) from error
    return _checked(Path(folder), repo)


def _why_unreachable(cause: BaseException | None) -> str:
    """Half a sentence for what kept the library from listing the files."""
    from huggingface_hub import utils as hub  # loaded already, see `download`

    if isinstance(cause, hub.OfflineModeIsEnabled):
        return "access to the hub is switched off (HF_HUB_OFFLINE)"
    if isinstance(cause, hub.HfHubHTTPError):
        return f"the hub answered with status {cause.response.status_code} (try again later)"
    return "the hub cannot be reached (check the network)"


def _why_failed(repo: str, error: Exception) -> str:
    """A sentence for a download that began and broke off, or could not be stored."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the disk for {repo}: free some and run again"
    if isinstance(error, OSError) and error.filename:
        return f"cannot store {repo} in the cache: {error.strerror}: {error.filename}"
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return f"the download of {repo} broke off (run again, finished files are kept): {reason}"


def _checked(folder: Path, repo: str) -> Path:
    """Return `folder` if it holds a checkpoint; else name what the hub's folder lacks."""
    if not any(folder.glob("*.safetensors")):
        original = repo[:-5] if repo.lower().endswith("-gguf") else "the original checkpoint"
        raise ModelNotFound(f"{repo} holds no *.safetensors weights: use {original}")
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{repo} holds no config.json: it is not a checkpoint that can run")
    return folder

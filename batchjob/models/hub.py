"""Fetches a model from the Hugging Face hub into its own cache, pinned to one commit."""

from __future__ import annotations

from pathlib import Path

from batchjob.errors import BatchJobError, StoppedEarlyError, UsageError

# Weights only as safetensors, no code, nothing from sub-directories (other formats of the same weights).
_WANTED = (
    "*.json",
    "*.safetensors",
    "chat_template.jinja",
    "merges.txt",
    "vocab.txt",
    "*.model",
)
_UNWANTED = ("*/*", "consolidated*")


def download(model: str, *, revision: str | None) -> tuple[Path, str]:
    """The local directory of a hub model and its commit. Files that are in the cache are not fetched again.

    Works offline (HF_HUB_OFFLINE=1) once the commit is in the cache. Raises UsageError (no such model or revision, no
    access) or StoppedEarlyError (the hub cannot be reached: try again).
    """
    from huggingface_hub import errors, snapshot_download

    at = f" at revision {revision}" if revision else ""
    try:
        path = snapshot_download(
            model, revision=revision, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)
        )
    except errors.GatedRepoError:
        raise UsageError(
            f"the hub model {model} is gated: accept its terms on its page, then log in with `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"--model {model} is neither a local path nor a model on the hub (or it is private: `hf auth login`)"
        ) from None
    except (errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise UsageError(f"the hub has no model {model}{at}: {_first_line(error)}") from None
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(model, at, error) from None
    except OSError as error:  # HTTP errors, time-outs and a full disk are all OSErrors there
        raise _unreachable(model, at, error) from None
    return Path(path), Path(path).name


def _unreachable(model: str, at: str, error: Exception) -> BatchJobError:
    return StoppedEarlyError(
        f"the model {model}{at} is not on this machine and could not be fetched from the hub: {_first_line(error)}. "
        "If --model was meant as a path, it does not exist"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

"""Upload an exported directory to the Hugging Face Hub, by huggingface_hub and its log-in."""

from pathlib import Path

from deberta_ds.errors import UserError, first_line

PRIVATE_FILES = ["conversion.json"]  # names paths of this machine


def check_repository(name: str) -> None:
    """Raise UserError if the Hub would not take the name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push {name}: {first_line(error)}") from None


def push(directory: Path, repository: str, private: bool = False) -> str:
    """Upload all files in one commit, making the repository if there is none; return its address.

    UserError if the Hub refuses, or cannot be reached; nothing is committed then.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi()
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        info = api.upload_folder(repo_id=repository, folder_path=directory,
                                 ignore_patterns=PRIVATE_FILES,
                                 commit_message="Upload a model exported by deberta_ds")
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError, RuntimeError, ValueError) as error:
        # The library wraps what is said of a large file: RuntimeError, or ValueError of a batch.
        said = first_line(error.__cause__ or error)
        raise UserError(f"{repository}: the Hub did not take it ({said}); {directory} "
                        "is whole: log in with `hf auth login` and upload it with `hf upload "
                        f"{repository} {directory}`") from error
    return str(info.commit_url)

"""Sends a folder of Hugging Face's files to the hub.

huggingface_hub makes the model there and uploads. Files that the hub has are not sent again, so
the same command goes on after a broken one. Invariant: a commit names only files that are whole.
"""

from pathlib import Path

import mjax
from mjax.checkpoint.base.hub import HubName, hub_errors, import_hub


def push_folder(
    folder: Path, to: HubName, private: bool = False, message: str | None = None
) -> str:
    """Upload a folder to a model of the hub, which is made if need be; returns the commit's URL.

    to: with the branch, which is made likewise. private: a new model is seen by its owners alone.
    message: of the commit. Raises `UserError` for what the hub refuses.
    """
    with hub_errors(str(to), sends=True):
        api = import_hub().HfApi(library_name="mjax", library_version=mjax.__version__)
        api.create_repo(to.repo, private=private or None, exist_ok=True)
        if to.revision != "main" and not to.revision.startswith("refs/"):
            api.create_branch(to.repo, branch=to.revision, exist_ok=True)
        made = api.upload_folder(
            repo_id=to.repo,
            folder_path=folder,
            revision=to.revision,
            commit_message=message or f"Upload by mjax {mjax.__version__}",
        )
    return str(made.commit_url)

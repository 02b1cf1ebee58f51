"""Export: a run's trained policy as a folder, and on request to the hub."""

from pathlib import Path

from rich.console import Console

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import AnyStorage
from gleaner.tasks.journal import Journal
from gleaner.tasks.publishing import policy_key
from gleaner.tasks.store import ObjectStore


def export(storage: AnyStorage, run: str, folder: Path, hub: str | None = None) -> None:
    """Copy the run's published policy to `folder`; with `hub` push the folder to that repository.

    Raises:
        ConfigurationError: no such run, it was not published yet, or the folder is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"{folder} is not empty: name another folder")
    store = ObjectStore(storage)
    last = Journal(store, run).last()
    if last is None:
        raise ConfigurationError(f"there is no run {run} in the store: `gleaner bank ls` lists what there is")
    record = store.lookup(policy_key(last[1]["version"]))
    if record is None:
        raise ConfigurationError(
            f"run {run} has not ended yet: start it again with the same command, then export"
        )
    store.fetch_folder(record.objects, folder)
    console = Console()
    console.print(f"policy of {run} in {folder}", highlight=False)
    if hub is not None:
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(hub, exist_ok=True)
        api.upload_folder(repo_id=hub, folder_path=folder)
        console.print(f"pushed to {hub}", highlight=False)

"""The embedded world: scenes with exact metadata, their verifier, and the models that ship with the package."""

from importlib import resources
from pathlib import Path


def embedded(name: str) -> Path | None:
    """The folder of the model of that name, None where none is embedded."""
    folder = Path(str(resources.files("flowrl.zoo"))) / "assets" / name
    return folder if "/" not in name and name.strip(".") and folder.is_dir() else None

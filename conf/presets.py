"""The presets that exist, found without reading Hydra."""

from pathlib import Path

BUILT_IN = Path(__file__).resolve().parent
GROUPS = ("environment", "policy", "method", "engine", "storage", "experiment", "compare")
"""What `GROUP=NAME` may choose; each is a folder of YAML files."""


def available_presets(group: str, presets: Path | None = None) -> dict[str, str]:
    """Names that `group=NAME` accepts, each with the comment at the head of its file.

    Args:
        presets: a folder of the user's own presets. A name there stands back behind a built-in one.
    """
    folders = [presets / group] if presets else []
    files = {file.stem: file for folder in [*folders, BUILT_IN / group] for file in folder.glob("*.yaml")}
    return {name: _head_comment(files[name]) for name in sorted(files)}


def _head_comment(file: Path) -> str:
    comment = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return " ".join(comment)

"""The config files that come with softbottle, by name: `--config ptb:mos`.

In a checkout they are the files of configs/. The wheel carries the same files as data,
under share/softbottle/configs of the environment that it is installed in.
"""

import importlib.metadata
import pathlib

import softbottle


def files() -> dict[str, pathlib.Path]:
    """Where each config file is, by its name without `.py`."""
    root = pathlib.Path(softbottle.__file__).resolve().parents[1]
    # Other packages may have a folder of this name beside an installed softbottle.
    if (root / "setup.cfg").exists() and (root / "configs").is_dir():
        found = (root / "configs").glob("*.py")
    else:
        found = (
            pathlib.Path(file.locate()).resolve()
            for file in importlib.metadata.files("softbottle") or ()
            if file.match("share/softbottle/configs/*.py")
        )
    return {path.stem: path for path in sorted(found)}


def resolve(value: str) -> str:
    """The value of --config with the path of its file: `ptb:mos` has that of ptb.py.

    Raises:
        ValueError: if there is no such file, naming those that come with softbottle.
    """
    file, colon, argument = value.partition(":")
    if pathlib.Path(file).is_file():
        return value
    known = files()
    if file in known:
        return f"{known[file]}{colon}{argument}"
    raise ValueError(
        f"--config: there is no file {file!r} here, and softbottle's own configs are "
        f"{', '.join(known)} (as in --config quickstart:mos)."
    )

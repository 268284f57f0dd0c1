"""What --config may be beside a file: `ptb:mos`, `runs/ptb-mos/config.json`.

The first names a file that comes with softbottle. In a checkout these are the files of
configs/. The wheel carries the same files as data, under share/softbottle/configs of
the environment that it is installed in. The second has the settings of a run.
"""

import importlib.metadata
import importlib.util
import pathlib
import sys

import softbottle
from softbottle.config import Config

_RUN = "config.json"  # of a run, in its folder
_STORED = pathlib.Path(__file__).with_name("stored.py")


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
    """The value of --config as a config file: `ptb:mos` with the path of ptb.py.

    Raises:
        ValueError: if there is no such file, naming those that come with softbottle.
    """
    file, colon, argument = value.partition(":")
    path = pathlib.Path(file)
    if path.is_file():
        return f"{_STORED}:{file}" if path.name == _RUN else value
    known = files()
    if file in known:
        return f"{known[file]}{colon}{argument}"
    raise ValueError(
        f"--config: there is no file {file!r} here, and softbottle's own configs are "
        f"{', '.join(known)} (as in --config quickstart:mos)."
    )


def load(value: str) -> Config:
    """The config of a value of --config: `ptb:mos,et`.

    Raises:
        ValueError: if there is no such file, or it has no such argument.
    """
    file, _, argument = resolve(value).partition(":")
    path = pathlib.Path(file).resolve()
    enable_imports(path)
    spec = importlib.util.spec_from_file_location(f"{path.stem}_config", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--config: {file!r} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(argument) if argument else module.get_config()


def enable_imports(path: pathlib.Path) -> None:
    """Have a config file find its neighbours: `from configs import ptb`, anywhere."""
    folder = str(path.resolve().parents[1])
    if folder not in sys.path:
        sys.path.append(folder)


def run_folder(value: str) -> pathlib.Path | None:
    """The folder of the run whose settings a resolved value stands for, if it does."""
    file, _, argument = value.partition(":")
    return pathlib.Path(argument).parent if file == str(_STORED) else None

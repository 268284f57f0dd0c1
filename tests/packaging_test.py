"""The wheel, installed without extras where there is nothing but jax and its own needs.

No network: the packages of the new environment are links to those of this one.
"""

import configparser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile

import pytest

import softbottle
from softbottle import cli
from tests import ROOT, commands

CORE = ("jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "scipy")
EXTRAS = {
    *("train", "data", "subwords", "analysis", "gguf", "hf", "tensorboard"),
    *("tensorflow", "docs"),
}


def run(*command, **options):
    """A finished process that sees nothing of this checkout but what it is given."""
    # The bytecode of this environment's packages lies beside them, linked or not; under
    # a prefix, that of the new environment's paths would be made anew.
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONPYCACHEPREFIX"}
    environment = {
        name: text for name, text in os.environ.items() if name not in hidden
    }
    return subprocess.run(
        [*map(str, command)],
        env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        **options,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("softbottle", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    system = tomllib.loads((source / "pyproject.toml").read_text())["build-system"]
    # What `python -m build` does, in one process instead of three.
    program = f"import {system['build-backend']} as it; it.build_wheel('.')"
    done = run(sys.executable, "-c", program, cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = source.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def requirements(wheel):
    """Names of the packages that the wheel asks for, by extra; "" without any."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    lines = re.findall(r"^Requires-Dist: ([\w.-]+)(.*)$", text, re.MULTILINE)
    extras = re.findall(r"^Provides-Extra: (.*)$", text, re.MULTILINE)
    found = {extra: set() for extra in ["", *extras]}
    for name, rest in lines:
        extra = re.search(r"extra == ['\"](\w+)", rest)
        found[extra[1] if extra else ""].add(name)
    return {extra: canonical(names) for extra, names in found.items()}


def canonical(names):
    """Names of packages as pip compares them."""
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a new environment with the wheel and no extra."""
    folder = tmp_path_factory.mktemp("core")
    venv.create(folder, symlinks=True)
    interpreter = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    for name in CORE:
        distribution = importlib.metadata.distribution(name)
        tops = {path.parts[0] for path in distribution.files}
        for top in tops - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    # Fails where the wheel asks for anything that is not there.
    options = ("--python", interpreter, "install", "--no-index")
    done = run(sys.executable, "-m", "pip", *options, wheel)
    assert done.returncode == 0, done.stderr
    return interpreter


EXAMPLE = """
{example}
import numpy as np
gradient = jax.jit(jax.grad(head.loss))(*output, hidden_TD, labels_T)
assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
np.testing.assert_allclose(loss, nll_T.sum(), rtol=1e-5)
assert ids_T.shape == (tokens,) and (0 <= ids_T).all() and (ids_T < vocab).all()
print(softbottle.__file__)
"""
IMPORTS = """
import importlib, importlib.util, logging, pkgutil, sys, types, softbottle
for name in {absent}:
    assert importlib.util.find_spec(name) is None, name
# jax 0.10 imports absl there and does not ask for it.
sys.modules["absl"] = types.ModuleType("absl")
sys.modules["absl"].logging = logging
import jax.experimental.pallas.mosaic_gpu
del sys.modules["absl"]
for package in (softbottle.ops, softbottle.heads):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        print(module.name)
try:
    softbottle.modules
except ModuleNotFoundError as error:
    assert error.name == "flax"
"""


@pytest.mark.slow
def test_the_readmes_example_runs_and_heads_and_ops_import_with_jax_and_numpy_alone(
    python, tmp_path
):
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    absent = ("absl", "chex", "flax", "ml_collections", "optax", "orbax", "pyarrow")
    program = EXAMPLE.format(example=example) + IMPORTS.format(absent=absent)
    done = run(python, "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path, *imported = done.stdout.split()
    assert path.startswith(str(python.parents[1]))
    assert {"softbottle.heads.mos", "softbottle.ops.mixture.api"} <= {*imported}


# What the console script does, for one command after the other.
COMMANDS = """
import sys
from softbottle import cli
for name in {names}:
    sys.argv[:] = ["softbottle", name]
    try:
        cli.main()
    except SystemExit as ended:
        print(ended.code)
"""


def test_a_command_without_its_extra_says_which(python, requirements, tmp_path):
    started = run(python.with_name("softbottle"), "train", cwd=tmp_path)
    assert started.returncode == 2, started.stderr
    done = run(python, "-c", COMMANDS.format(names=cli.COMMANDS), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2"] * len(cli.COMMANDS)
    lines = dict(zip(cli.COMMANDS, done.stderr.splitlines(), strict=True))
    assert started.stderr.splitlines() == [lines["train"]]
    # Every package of the extra that does not come with jax is looked for, but the
    # one that only texts which are not encoded yet need.
    packages = importlib.metadata.packages_distributions()
    looked_for = requirements["train"] - canonical([*CORE, "pyarrow"])
    for name, line in lines.items():
        start, _, rest = line.partition("(")
        assert start == f"softbottle {name} needs packages that are not installed "
        modules, _, advice = rest.partition("): ")
        extra = "analysis" if name == "analyze" else "train"
        assert advice == f"pip install 'softbottle[{extra}]'"
        missing = {name for module in modules.split(", ") for name in packages[module]}
        assert looked_for <= canonical(missing)


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_the_tool_lists_its_commands_where_there_is_nothing_but_jax(
    python, tmp_path, arguments
):
    done = run(python.with_name("softbottle"), *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^    (\w+)  +\S", done.stdout, re.MULTILINE) == [*cli.COMMANDS]


CONFIGS = """
import sys
from softbottle.cli import configs
path = configs.resolve("wt2:mos").partition(":")[0]
assert path.startswith(sys.prefix), path
print(*configs.files())
"""


def test_the_configs_come_with_the_wheel(python, tmp_path):
    done = run(python, "-c", CONFIGS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = {path.stem for path in (ROOT / "configs").glob("*.py")}
    assert set(done.stdout.split()) == expected


@pytest.mark.slow
def test_a_corpus_whose_extra_is_missing_says_which(tmp_path):
    (tmp_path / "dataset_info.json").write_text("{}")
    answer = commands.finish(
        commands.start(
            *("train.py", "--config", "configs/lm1b.py"),
            *("--config.data.path", tmp_path, "--workdir", tmp_path / "run"),
            absent=("tensorflow_datasets",),
        )
    )
    assert answer.code == 2, answer.errors
    assert answer.errors.splitlines()[-1] == (
        "tensorflow_datasets is not installed: pip install 'softbottle[data]'"
    )


def test_the_wheel_has_all_modules_and_the_marker_of_types(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    data = f"softbottle-{softbottle.__version__}.data/data/share/softbottle"
    package = {str(path.relative_to(ROOT)) for path in ROOT.glob("softbottle/**/*.py")}
    configs = {f"{data}/configs/{path.name}" for path in ROOT.glob("configs/*.py")}
    assert names == package | configs | {"softbottle/py.typed"}


def test_the_wheel_asks_for_jax_and_numpy_alone_and_tests_for_all(requirements):
    assert requirements[""] == {"jax", "numpy"}
    assert requirements.keys() - {""} == EXTRAS | {"test"}
    assert "chex" not in set().union(*(requirements[extra] for extra in EXTRAS))


def test_modules_is_an_attribute_that_is_imported_at_first_use(monkeypatch):
    monkeypatch.delattr(softbottle, "modules", raising=False)
    assert softbottle.modules.LinenHead.__module__ == "softbottle.modules"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = softbottle.nothing


def test_the_version_has_one_source(wheel):
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert settings["metadata"]["version"] == "attr: softbottle.__version__"
    assert wheel.name.split("-")[1] == softbottle.__version__


def test_the_changelog_begins_with_this_version_in_the_usual_sections():
    text = (ROOT / "CHANGELOG.md").read_text()
    newest, *_ = re.findall(r"^## (\S+)", text, re.MULTILINE)
    assert newest == softbottle.__version__
    usual = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= usual

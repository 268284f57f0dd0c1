"""Imports point downwards, and importing the package is cheap."""

import ast
import subprocess
import sys

import pytest

from tests import ROOT

# A package stands for every file in it.
FLOORS = {
    "softbottle.config": 1,
    "softbottle.files": 1,
    "softbottle.ops": 1,
    "softbottle.sections": 1,
    "softbottle.backbones": 2,
    "softbottle.data": 2,
    "softbottle.distributed": 2,
    "softbottle.drawing": 2,
    "softbottle.heads": 2,
    "softbottle.sharding": 2,
    "softbottle.model": 3,
    "softbottle.modules": 3,
    "softbottle.variants": 3,
    "softbottle.training": 4,
    "softbottle.analysis": 5,
    "softbottle.bench": 5,
    "softbottle.scoring": 5,
    "softbottle.cli": 6,
    "softbottle.experiments": 6,
    "softbottle.commands": 7,
    "softbottle.__main__": 8,
    "launch": 8,
}
# The package's own door: it opens onto floors 1 and 2 alone.
ROOT_DOOR = {"softbottle.ops", "softbottle.heads"}
# But for this name, which is loaded when it is first used.
LATER = {"softbottle.analysis.capture.Capture"}
# What a user's own program must not wait for: everything that an extra brings.
HEAVY = {
    *("absl", "chex", "flax", "matplotlib", "ml_collections", "optax", "orbax"),
    *("pyarrow", "tensorboard", "tensorflow", "tensorflow_datasets", "tokenizers"),
    *("torch", "tqdm", "transformers"),
}
# Slow to import, and needed only where their kernels run.
PALLAS = "jax.experimental.pallas"


def unit_of(module):
    """The entry of FLOORS that a dotted module name belongs to, or None."""
    while module:
        if module in FLOORS:
            return module
        module = module.rpartition(".")[0]
    return None


def are_neighbours(unit, other):
    """Two plain files of one floor, both of the package softbottle itself."""
    files = [
        ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in (unit, other)
    ]
    return FLOORS[unit] == FLOORS[other] and all(file.exists() for file in files)


def modules():
    for top in ("softbottle", "launch"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield path, ".".join(part for part in parts if part != "__init__")


MODULES = list(modules())


def imports(path, module):
    """Dotted names of our own modules that a file imports, at any depth."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (n for n in names if n.split(".")[0] in ("softbottle", "launch"))


@pytest.mark.parametrize("path, module", MODULES, ids=[name for _, name in MODULES])
def test_a_file_imports_only_from_floors_below_it_or_its_own_package(path, module):
    if module == "softbottle":
        names = set(imports(path, module)) - LATER
        assert {unit_of(name) for name in names} <= ROOT_DOOR
        return
    unit = unit_of(module)
    assert unit is not None, f"{module} has no floor; add it to FLOORS in this test"
    for name in imports(path, module):
        other = unit_of(name)
        if other is None:
            # `from softbottle import mos`: a public name of floor 2.
            other = "softbottle.heads"
        below = FLOORS[other] < FLOORS[unit]
        assert below or other == unit or are_neighbours(unit, other), (
            f"{module} (floor {FLOORS[unit]}) imports {name} (floor {FLOORS[other]})"
        )


def test_the_test_itself_sees_an_import_that_points_upwards(tmp_path):
    path = tmp_path / "base.py"
    path.write_text(
        "def f():\n    from softbottle import training\n    from . import mos\n"
    )
    found = set(imports(path, "softbottle.heads.base"))
    assert found == {"softbottle.training", "softbottle.heads.mos"}
    assert FLOORS[unit_of("softbottle.training")] > FLOORS["softbottle.heads"]


@pytest.mark.parametrize("package, allowed", [("ops", {"jax"}), ("heads", {"jax"})])
def test_ops_and_heads_need_jax_and_numpy_alone(package, allowed):
    standard = sys.stdlib_module_names | {"softbottle", "numpy"} | allowed
    for path in (ROOT / "softbottle" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in names:
                assert name.split(".")[0] in standard, f"{path.name} imports {name}"


@pytest.fixture(scope="module")
def fresh_import():
    """(modules that a head loads beyond jax's, live backends).

    Importing softbottle is the program's first line, and has loaded nothing then.
    """
    program = (
        "import sys, softbottle\n"
        "assert not {'jax', 'numpy', 'softbottle.heads'} & set(sys.modules)\n"
        "import jax, jax.numpy\n"
        "before = set(sys.modules)\n"
        "softbottle.mos, softbottle.Options\n"
        "loaded = set(sys.modules) - before\n"
        "from jax._src import xla_bridge\n"
        "print(len(xla_bridge._backends), *loaded)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    backends, *loaded = done.stdout.split()
    return set(loaded), int(backends)


def test_a_head_loads_nothing_heavy(fresh_import):
    loaded, _ = fresh_import
    assert "softbottle.heads.mos" in loaded
    assert HEAVY.isdisjoint(name.split(".")[0] for name in loaded)
    assert not any(name.startswith(PALLAS) for name in loaded)


def test_a_head_loads_heads_and_ops_alone(fresh_import):
    loaded, _ = fresh_import
    ours = {unit_of(name) for name in loaded if name.startswith("softbottle.")}
    # The table of heads reads a config's settings; config.py needs no package.
    assert ours == ROOT_DOOR | {"softbottle.config", "softbottle.sections"}


def test_loading_a_head_touches_no_device(fresh_import):
    _, backends = fresh_import
    assert backends == 0


def test_a_capture_needs_jax_and_numpy_alone():
    program = (
        f"import sys\nfor name in {sorted(HEAVY)}: sys.modules[name] = None\n"
        "import numpy, softbottle\n"
        "softbottle.Capture.from_states(numpy.ones((3, 2)), numpy.ones((5, 2)))\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)

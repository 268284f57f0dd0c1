import os
import sys
import types

import jax
import pytest

from softbottle.cli import program
from softbottle.training import lock


def status_of(monkeypatch, main, *arguments):
    """The exit status of a command without flags of its own."""
    monkeypatch.setattr(sys, "argv", ["softbottle test", *arguments])
    command = types.ModuleType("softbottle.commands.test")
    command.main = main
    with pytest.raises(SystemExit) as end:
        program.run(command)
    return end.value.code


@pytest.fixture
def cache_settings(monkeypatch):
    """jax's settings of the cache, restored; the environment names none."""
    names = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "0")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_MAX_SIZE")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compiled_programs_are_kept_unless_it_is_said_otherwise(
    tmp_path, monkeypatch, cache_settings, capsys
):
    before = jax.config.jax_compilation_cache_dir
    program._keep_compiled("none")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    program._keep_compiled(str(tmp_path / "compiled"))
    assert jax.config.jax_compilation_cache_dir == before
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    (tmp_path / "file").touch()
    program._keep_compiled(str(tmp_path / "file" / "compiled"))
    assert "compiled programs are not kept: " in capsys.readouterr().err
    program._keep_compiled(str(tmp_path / "compiled"))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
    assert jax.config.jax_compilation_cache_max_size == program.CACHE_BYTES
    # So that processes which a command starts keep theirs there, too.
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "compiled")


def test_a_lack_of_memory_is_one_line_with_what_helps(monkeypatch, capsys):
    def main():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 17 GiB\n asked for")

    assert status_of(monkeypatch, main) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "RESOURCE_EXHAUSTED: 17 GiB asked for; " in line and "data.rows" in line


def test_a_folder_in_use_is_refused_in_one_line(monkeypatch, capsys):
    def main():
        raise lock.LockedError("runs/mine is in use")

    assert status_of(monkeypatch, main) == program.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert "runs/mine is in use" in line


def test_a_setting_of_no_config_is_refused_in_one_line(monkeypatch, capsys):
    word = "--config.train.steps=none"
    assert status_of(monkeypatch, None, word) == program.REFUSED
    assert capsys.readouterr().err == f"--config is needed for {word}\n"


def test_another_error_of_the_device_is_no_message_for_users(monkeypatch):
    def main():
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        status_of(monkeypatch, main)


def test_an_interruption_before_there_is_something_to_save_says_so(monkeypatch, capsys):
    def main():
        raise KeyboardInterrupt

    assert status_of(monkeypatch, main) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.fixture
def numbers_flag():
    """A function that parses one value of a flag for numbers."""
    made = []

    def parse(kind, *text):
        name = f"numbers_{len(made)}"
        holder = program.define_numbers(name, [1, 2], "Of a test.", kind)
        made.append(name)
        program.flags.FLAGS([""] + [f"--{name}={value}" for value in text])
        return holder.value

    yield parse
    program.flags.FLAGS.remove_flag_values(made)


def test_numbers_are_read_and_others_refused(numbers_flag):
    assert numbers_flag(int) == [1, 2]
    assert numbers_flag(int, "3") == [3]
    assert numbers_flag(float, "0.5,1e-3") == [0.5, 1e-3]
    for kind, text in ((int, "2.5"), (float, "1,,4"), (float, "nan"), (float, "")):
        with pytest.raises(program.flags.IllegalFlagValueError, match="with commas"):
            numbers_flag(kind, text)

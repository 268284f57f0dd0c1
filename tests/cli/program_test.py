import sys
import types

import jax
import pytest

from softbottle.cli import program


def status_of(monkeypatch, main):
    """The exit status of a command without flags."""
    monkeypatch.setattr(sys, "argv", ["softbottle test"])
    command = types.ModuleType("softbottle.commands.test")
    command.main = main
    with pytest.raises(SystemExit) as end:
        program.run(command)
    return end.value.code


def test_a_lack_of_memory_is_one_line_with_what_helps(monkeypatch, capsys):
    def main():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 17 GiB\n asked for")

    assert status_of(monkeypatch, main) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "RESOURCE_EXHAUSTED: 17 GiB asked for; " in line and "data.rows" in line


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

"""`softbottle compile` from a checkout: softbottle/commands/compile.py."""

from softbottle import cli

if __name__ == "__main__":
    cli.run("compile")

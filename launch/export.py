"""`softbottle export` from a checkout: softbottle/commands/export.py."""

from softbottle import cli

if __name__ == "__main__":
    cli.run("export")

"""`softbottle continuation` from a checkout: softbottle/commands/continuation.py."""

from softbottle import cli

if __name__ == "__main__":
    cli.run("continuation")

"""`softbottle retrofit` from a checkout: softbottle/commands/retrofit.py."""

from softbottle import cli

if __name__ == "__main__":
    cli.run("retrofit")

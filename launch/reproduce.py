"""`softbottle reproduce` from a checkout: softbottle/commands/reproduce.py."""

from softbottle import cli

if __name__ == "__main__":
    cli.run("reproduce")

"""`softbottle sweep` from a checkout: softbottle/commands/sweep.py."""

from softbottle import cli

if __name__ == "__main__":
    cli.run("sweep")

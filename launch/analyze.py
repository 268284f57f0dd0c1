"""`softbottle analyze` from a checkout: softbottle/commands/analyze.py."""

from softbottle import cli

if __name__ == "__main__":
    cli.run("analyze")

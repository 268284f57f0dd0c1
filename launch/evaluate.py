"""`softbottle evaluate` from a checkout: softbottle/commands/evaluate.py."""

from softbottle import cli

if __name__ == "__main__":
    cli.run("evaluate")

"""`softbottle train` from a checkout: softbottle/commands/train.py."""

from softbottle import cli

if __name__ == "__main__":
    cli.run("train")

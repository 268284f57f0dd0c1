"""`softbottle saturation` from a checkout: softbottle/commands/saturation.py."""

from softbottle import cli

if __name__ == "__main__":
    cli.run("saturation")

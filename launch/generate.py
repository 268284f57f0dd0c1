"""`softbottle generate` from a checkout: softbottle/commands/generate.py."""

from softbottle import cli

if __name__ == "__main__":
    cli.run("generate")

"""`softbottle frontier` from a checkout: softbottle/commands/frontier.py."""

from softbottle import cli

if __name__ == "__main__":
    cli.run("frontier")

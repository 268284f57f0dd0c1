"""`softbottle bench` from a checkout: softbottle/commands/bench.py."""

from softbottle import cli

if __name__ == "__main__":
    cli.run("bench")

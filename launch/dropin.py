"""`softbottle dropin` from a checkout: softbottle/commands/dropin.py."""

from softbottle import cli

if __name__ == "__main__":
    cli.run("dropin")

"""`python -m softbottle` is the command `softbottle`."""

import sys

from softbottle import cli

if __name__ == "__main__":
    sys.exit(cli.main())

"""`python -m kvmanager.keeper`."""

import sys

from kvmanager.keeper.keeper import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m kvmanager.mover`."""

import sys

from kvmanager.mover.mover import main

if __name__ == "__main__":
    sys.exit(main())

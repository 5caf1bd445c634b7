"""`python -m kvmanager.daemon`."""

import sys

from kvmanager.daemon.daemon import main

if __name__ == "__main__":
    sys.exit(main())

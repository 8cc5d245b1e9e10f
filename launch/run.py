"""python launch/run.py --nproc 4 script.py ARGS...   or   python launch/run.py --nproc 4 -m module ARGS..."""

import sys

from vocabshard.launching import main

if __name__ == "__main__":
    sys.exit(main())

import sys

from fczoo.cli.app import main

sys.argv[0] = "fczoo"  # records of a run name the command, which click would else call by this file
main()

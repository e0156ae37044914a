"""`python -m attnproof.cli`: the same as the console script, for an environment whose scripts are not on the path."""

from attnproof.cli import main

main()

"""`python -m autograder.grading` is the command `autograder`."""

from autograder.grading.cli import main

main()
